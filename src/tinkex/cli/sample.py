"""``tinkex sample``: sample a completion."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paths import CheckpointPath
from tinkex.cli.prompt_file import FORMS, Prompt, as_messages, as_tokens, read_prompt_file
from tinkex.cli.sampling_options import check_stops, read_params, sampling_options
from tinkex.cli.streams import read_input, write_text
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.tokenizers import Tokenizer
    from tinkex.types import SampledSequence, SampleResponse, SampleStreamEvent


@click.command(cls=Leaf)
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "prompt_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"Prompt file: {FORMS}.",
)
@click.option(
    "--model",
    help="Base model. Default: the server's only model, or SmolLM2-135M-Instruct if the server has it.",
)
@click.option(
    "--model-path",
    type=CheckpointPath(),
    help="Sample from this checkpoint instead of a base model.",
)
@click.option(
    "--chat/--raw",
    default=None,
    help="Send the prompt as a user message, or unchanged. Default: --chat if the model has a chat template.",
)
@click.option("--system", help="System message; implies --chat.")
@sampling_options(max_tokens=128, temperature=0.7)
@click.option(
    "-n", "--num-samples", type=click.IntRange(min=1), default=1, show_default=True, help="Number of samples."
)
@click.option("--prompt-logprobs", is_flag=True, help="With --json: print the logprob of every prompt token.")
@click.option(
    "--topk-prompt-logprobs",
    default=0,
    show_default=True,
    help="With --json: number of top tokens per prompt position.",
)
@click.option(
    "--topk-logprobs",
    default=0,
    show_default=True,
    help="With --json: number of top tokens per sampled token.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result to this file instead of stdout.",
)
@pass_invocation
def sample(
    invocation: Invocation,
    /,
    prompt: str | None,
    prompt_file: Path | None,
    model: str | None,
    model_path: str | None,
    chat: bool | None,
    system: str | None,
    num_samples: int,
    prompt_logprobs: bool,
    topk_prompt_logprobs: int,
    topk_logprobs: int,
    output: Path | None,
    **sampling: Any,
) -> None:
    """Sample a completion of a prompt. The prompt is an argument, a file (--file), or stdin.

    \b
    Examples:
      tinkex sample "What is the capital of France?" --local
      echo "Once upon a time" | tinkex sample --raw -n 3 --json
      tinkex sample "Who are you?" --model-path tinker://0a1b2c:train:0/sampler_weights/final
      tinkex sample "Name a colour." --local --regex "red|green|blue"
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if model is not None and model_path is not None:
        raise click.UsageError("give --model or --model-path, not both")
    check_stops(sampling)
    if (prompt_logprobs or topk_prompt_logprobs or topk_logprobs) and not invocation.as_json:
        raise click.UsageError(
            "logprobs are printed only with --json; add --json, or remove the logprobs option"
        )
    if system is not None and chat is False:
        raise click.UsageError("--system needs a chat; remove --raw")
    content = _read_prompt(prompt, prompt_file)
    if not content:
        raise click.UsageError("the prompt is empty")
    invocation.announce()
    from tinkex import types
    from tinkex.cli.base_model import choose_base_model
    from tinkex.tokenizers.conversation import end_of_turn

    params, max_tokens = read_params(sampling), sampling["max_tokens"]
    with invocation.service("sample") as service:
        if model_path is not None:
            sampler = service.create_sampling_client(model_path=model_path)
        else:
            sampler = service.create_sampling_client(base_model=choose_base_model(service, model))
        tokenizer = sampler.get_tokenizer()
        tokens, is_chat = _tokenize(tokenizer, content, chat, system)
        if is_chat and params.stop is None and (ends := end_of_turn(tokenizer)):
            params = params.model_copy(update={"stop": ends})
        if num_samples == 1 and output is None and not invocation.as_json:
            with sampler.sample_stream(types.ModelInput.from_ints(tokens), 1, params) as stream:
                _note_context_end(invocation, _print_stream(stream, tokenizer), max_tokens)
            return
        future = sampler.sample(
            types.ModelInput.from_ints(tokens),
            num_samples,
            params,
            prompt_logprobs,
            topk_prompt_logprobs,
            topk_logprobs,
        )
        response = invocation.wait(future, "the sample")
    cut = [len(one.tokens) for one in response.sequences if one.stop_reason == "length"]
    _note_context_end(invocation, min(cut, default=None), max_tokens)
    if invocation.as_json:
        from tinkex.cli.render import as_json

        text = as_json(_value(tokenizer, tokens, response))
    else:
        texts = [_text(tokenizer, sequence) for sequence in response.sequences]
        text = texts[0] if num_samples == 1 else "\n\n".join(
            f"Sample {number} ({sequence.stop_reason}):\n{one}"
            for number, (one, sequence) in enumerate(zip(texts, response.sequences, strict=True), 1)
        )  # fmt: skip
    invocation.write(text, output)


def _note_context_end(invocation: Invocation, num_tokens: int | None, max_tokens: int) -> None:
    """Says that a sample has fewer tokens than requested, which is so where the context ends."""
    if num_tokens is not None and num_tokens < max_tokens:
        invocation.status(
            f"(stopped after {num_tokens} of {max_tokens} tokens, at the end of the model's context)"
        )


def _print_stream(stream: Iterable[SampleStreamEvent], tokenizer: Tokenizer) -> int | None:
    """Prints a sample token by token; returns its length unless it stopped by itself.

    A server that does not stream sends the whole sample as one piece.
    """
    from tinkex.tokenizers.conversation import visible_text
    from tinkex.types import SampledToken

    without_text: list[int] = []  # tokens of a server that does not stream
    cut: int | None = None
    for event in stream:
        if not isinstance(event, SampledToken):
            cut = event.num_tokens if event.stop_reasons == ["length"] else None
            continue
        if event.text is None:
            without_text.append(event.token)
        else:
            shown = visible_text(tokenizer, event.token, event.text, ends=event.stop_reason == "stop")
            write_text(shown, end="")
    write_text(tokenizer.decode(without_text, skip_special_tokens=True))
    return cut


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> Prompt:
    """Returns the prompt: text, token ids or messages."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give the prompt as argument or with --file, not both")
    if prompt is not None and prompt != "-":
        if not prompt.isprintable() and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise click.UsageError("the prompt is not UTF-8")
        return prompt
    if prompt_file is not None:
        return read_prompt_file(prompt_file)
    text = read_input()
    if text is None:
        raise click.UsageError("no prompt; give it as argument, with --file, or on stdin")
    return text.removesuffix("\n")


def _tokenize(
    tokenizer: Tokenizer, content: Prompt, chat: bool | None, system: str | None
) -> tuple[list[int], bool]:
    """Returns the tokens of the prompt, and whether they are a chat."""
    from tinkex.tokenizers.conversation import has_chat_template, render_conversation

    tokens, messages = as_tokens(content), as_messages(content)
    if tokens is not None:
        if chat or system is not None:
            raise click.UsageError("a prompt of token ids is sent unchanged; remove --chat and --system")
        return tokens, False
    if chat is None:
        chat = messages is not None or system is not None or has_chat_template(tokenizer)
    if not chat:
        if messages is not None:
            raise click.UsageError("a prompt of messages is a chat; remove --raw")
        return tokenizer.encode(str(content), add_special_tokens=True), False
    conversation = messages or [{"role": "user", "content": content}]
    if system is not None:
        conversation = [{"role": "system", "content": system}, *conversation]
    try:
        return render_conversation(tokenizer, conversation), True
    except SetupError as error:
        raise SetupError(f"{error}; send the prompt unchanged with --raw") from error


def _text(tokenizer: Tokenizer, sequence: SampledSequence) -> str:
    return tokenizer.decode(sequence.tokens, skip_special_tokens=True)


def _value(tokenizer: Tokenizer, tokens: list[int], response: SampleResponse) -> dict[str, Any]:
    value: dict[str, Any] = {
        "prompt_tokens": tokens,
        "sequences": [
            {
                "text": _text(tokenizer, one),
                "tokens": one.tokens,
                "logprobs": one.logprobs,
                "stop_reason": one.stop_reason,
                **({} if one.topk_logprobs is None else {"topk_logprobs": one.topk_logprobs}),
            }
            for one in response.sequences
        ],
    }
    if response.prompt_logprobs is not None:
        value["prompt_logprobs"] = response.prompt_logprobs
    if response.topk_prompt_logprobs is not None:
        value["topk_prompt_logprobs"] = response.topk_prompt_logprobs
    return value
