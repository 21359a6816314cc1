"""``tinkex chat``: a conversation with a model in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paths import CheckpointPath
from tinkex.cli.prompt_file import as_messages, read_prompt_file
from tinkex.cli.sampling_options import check_stops, read_params, sampling_options
from tinkex.errors import SetupError


@click.command(cls=Leaf)
@click.option(
    "--model",
    help="Base model. Default: the server's only model, or SmolLM2-135M-Instruct if the server has it.",
)
@click.option(
    "--model-path", type=CheckpointPath(), help="Chat with this checkpoint instead of a base model."
)
@click.option(
    "--compare", is_flag=True, help="Show the answers of the checkpoint and of its base model side by side."
)
@click.option("--system", help="System message.")
@click.option(
    "--file",
    "conversation_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Continue the conversation in this file, which /save wrote: {"messages": […]}.',
)
@sampling_options(max_tokens=512, temperature=0.7)
@pass_invocation
def chat(
    invocation: Invocation,
    /,
    model: str | None,
    model_path: str | None,
    compare: bool,
    system: str | None,
    conversation_file: Path | None,
    **sampling: Any,
) -> None:
    """Chat with a base model or a checkpoint.

    Answers appear as they are sampled. Ctrl-C stops an answer, Ctrl-D quits; /help lists the commands.
    If stdin is not a terminal, each of its lines is a message. With --json each answer is one line of JSON.

    \b
    Examples:
      tinkex chat --local
      tinkex chat --model-path @last --compare
      echo "Where is the sea?" | tinkex chat --local --temperature 0
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if model is not None and model_path is not None:
        raise click.UsageError("give --model or --model-path, not both")
    if compare and model_path is None:
        raise click.UsageError("--compare needs a checkpoint beside its base model; add --model-path")
    check_stops(sampling)
    messages = None if conversation_file is None else as_messages(read_prompt_file(conversation_file))
    if conversation_file is not None and messages is None:
        raise SetupError(f'{conversation_file} holds no conversation; it must be {{"messages": […]}}')
    invocation.announce()
    from tinkex.cli.base_model import choose_base_model
    from tinkex.cli.chat_session import ChatSession

    params = read_params(sampling)
    with invocation.service("chat") as service:
        name = model_path if model_path is not None else choose_base_model(service, model)
        session = ChatSession(invocation, service, params, name)
        if messages is not None:
            session.load(messages)
        if system is not None:
            session.set_system(system)
        if compare:
            session.compare()
        session.run()
