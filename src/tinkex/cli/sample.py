"""``tinkex sample``: sample a completion."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paths import CheckpointPath
from tinkex.cli.streams import read_input
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
    help='Prompt file: text, or JSON: a list of token ids, {"tokens": […]} or {"messages": […]}.',
)
@click.option(
    "--model",
    help="Base model. Default: the server's only model, or SmolLM2-135M-Instruct if the server has it.",
)
@click.option(
    "--model-path",
    type=CheckpointPath("weights", "sampler_weights"),
    help="Sample from this checkpoint instead of a base model.",
)
@click.option(
    "--chat/--raw",
    default=None,
    help="Send the prompt as a user message, or unchanged. Default: --chat if the model has a chat template.",
)
@click.option("--system", help="System message; implies --chat.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Maximum number of sampled tokens.",
)
@click.option(
    "--temperature", type=float, default=1.0, show_default=True, help="Sampling temperature; 0 is greedy."
)
@click.option(
    "--top-k", type=int, default=-1, show_default=True, help="Sample from the top k tokens; -1 disables it."
)
@click.option(
    "--top-p",
    type=float,
    default=1.0,
    show_default=True,
    help="Sample from the smallest set of tokens with this probability mass; 1 disables it.",
)
@click.option("--seed", type=int, help="Random seed. Default: random.")
@click.option("--stop", "stops", multiple=True, metavar="TEXT", help="Stop after this text; repeatable.")
@click.option(
    "--stop-token", "stop_tokens", type=int, multiple=True, help="Stop after this token id; repeatable."
)
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
    prompt: str | None,
    prompt_file: Path | None,
    model: str | None,
    model_path: str | None,
    chat: bool | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stops: tuple[str, ...],
    stop_tokens: tuple[int, ...],
    num_samples: int,
    prompt_logprobs: bool,
    topk_prompt_logprobs: int,
    topk_logprobs: int,
    output: Path | None,
) -> None:
    """Sample a completion of a prompt. The prompt is an argument, a file (--file), or stdin.

    \b
    Examples:
      tinkex sample "What is the capital of France?" --local --temperature 0
      echo "Once upon a time" | tinkex sample --raw -n 3 --json
      tinkex sample "Who are you?" --model-path tinker://0a1b2c:train:0/sampler_weights/final
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if model is not None and model_path is not None:
        raise click.UsageError("give --model or --model-path, not both")
    if stops and stop_tokens:
        raise click.UsageError("give --stop or --stop-token, not both")
    if (prompt_logprobs or topk_prompt_logprobs or topk_logprobs) and not invocation.as_json:
        raise click.UsageError(
            "logprobs are printed only with --json; add --json, or remove the logprobs option"
        )
    if system is not None and chat is False:
        raise click.UsageError("--system needs a chat; remove --raw")
    content = _read_prompt(prompt, prompt_file)
    if not content:
        raise click.UsageError("the prompt is empty")
    from tinkex import types
    from tinkex.cli.base_model import choose_base_model

    stop: list[str | int] | None = [*stops, *stop_tokens] or None
    try:
        params = types.SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with invocation.service("sample") as service:
        if model_path is not None:
            sampler = service.create_sampling_client(model_path=model_path)
        else:
            sampler = service.create_sampling_client(base_model=choose_base_model(service, model))
        tokenizer = sampler.get_tokenizer()
        tokens = _tokenize(tokenizer, content, chat, system)
        if num_samples == 1 and output is None and not invocation.as_json:
            with sampler.sample_stream(types.ModelInput.from_ints(tokens), 1, params) as stream:
                _print_stream(stream, tokenizer)
            return
        response = sampler.sample(
            types.ModelInput.from_ints(tokens),
            num_samples,
            params,
            prompt_logprobs,
            topk_prompt_logprobs,
            topk_logprobs,
        ).result()
    if invocation.as_json:
        from tinkex.cli.render import as_json

        text = as_json(_value(tokenizer, tokens, response))
    else:
        texts = [_text(tokenizer, sequence) for sequence in response.sequences]
        text = texts[0] if num_samples == 1 else "\n\n".join(
            f"Sample {number} ({sequence.stop_reason}):\n{one}"
            for number, (one, sequence) in enumerate(zip(texts, response.sequences, strict=True), 1)
        )  # fmt: skip
    if output is None:
        click.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{output} cannot be written ({error.strerror}); choose another file") from error
    invocation.status(f"Wrote {output}")


def _print_stream(stream: Iterable[SampleStreamEvent], tokenizer: Tokenizer) -> None:
    """Prints a sample token by token; a server that does not stream sends the whole sample as one piece."""
    from tinkex.types import SampledToken

    without_text: list[int] = []  # tokens of a server that does not stream
    for event in stream:
        if not isinstance(event, SampledToken):
            continue
        if event.text is None:
            without_text.append(event.token)
        elif tokenizer.decode([event.token], skip_special_tokens=True):  # skips end-of-message tokens
            click.echo(event.text, nl=False)
    click.echo(tokenizer.decode(without_text, skip_special_tokens=True))


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> Any:
    """Returns the prompt: text, token ids or an object with messages."""
    import json

    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give the prompt as argument or with --file, not both")
    if prompt is not None and prompt != "-":
        if not prompt.isprintable() and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise click.UsageError("the prompt is not UTF-8")
        return prompt
    if prompt_file is None:
        text = read_input()
        if text is None:
            raise click.UsageError("no prompt; give it as argument, with --file, or on stdin")
        return text.removesuffix("\n")
    try:
        text = prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{prompt_file} is not a readable UTF-8 file ({error})") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.removesuffix("\n")
    if _are_tokens(value):
        return value
    if not isinstance(value, dict) or not set(value) & {"tokens", "messages"}:
        return text.removesuffix("\n")
    if set(value) == {"tokens"} and _are_tokens(value["tokens"]):
        return value["tokens"]
    if set(value) == {"messages"} and _are_messages(value["messages"]):
        return value
    raise SetupError(
        f'{prompt_file} is neither {{"tokens": [ids]}} nor {{"messages": [{{"role": …, "content": …}}]}}; '
        "fix the file, or give the prompt as text"
    )


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)
    )


def _tokenize(tokenizer: Tokenizer, content: Any, chat: bool | None, system: str | None) -> list[int]:
    if isinstance(content, list):
        if chat or system is not None:
            raise click.UsageError("a prompt of token ids is sent unchanged; remove --chat and --system")
        return content
    messages = content["messages"] if isinstance(content, dict) else None
    if chat is None:
        has_template = getattr(tokenizer, "chat_template", None) is not None
        chat = messages is not None or system is not None or has_template
    if not chat:
        if messages is not None:
            raise click.UsageError("a prompt of messages is a chat; remove --raw")
        return tokenizer.encode(str(content), add_special_tokens=True)
    conversation = messages or [{"role": "user", "content": content}]
    if system is not None:
        conversation = [{"role": "system", "content": system}, *conversation]
    try:
        rendered = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"the chat template failed ({error}); send the prompt unchanged with --raw"
        ) from error
    return [int(token) for token in rendered]


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
