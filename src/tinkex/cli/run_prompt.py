"""``tinkex run --prompt …``: the samples of a raw prompt, with their logprobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.paths import CheckpointPath
from tinkex.cli.prompt_file import Prompt, as_messages, as_tokens, read_prompt_file
from tinkex.errors import TinkexError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tinkex.cli.invocation import Invocation
    from tinkex.clients.sampling import SamplingClient
    from tinkex.types import SampledSequence

__all__ = ["prompt_options", "sample_prompt"]

_OPTIONS = (
    click.option("--prompt", help="Sample from this text, sent as it is."),
    click.option(
        "--prompt-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help='Sample from a file: text, or JSON: a list of token ids or {"tokens": […]}.',
    ),
    click.option("--base-model", help="Base model. Default: as for 'tinkex sample'."),
    click.option(
        "--model-path",
        type=CheckpointPath(),
        help="Sample from this checkpoint instead of a base model.",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(min=1),
        help="Maximum new tokens. Default: as many as the model's context has room for.",
    ),
    click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy. Default: 1."),
    click.option("--top-k", type=int, help="Sample from the top k tokens. Default: -1, no limit."),
    click.option("--top-p", type=float, help="Sample from this probability mass. Default: 1, no limit."),
    click.option("--seed", type=int, help="Random seed. Default: random."),
    click.option("-n", "--num-samples", type=click.IntRange(min=1), help="Number of samples. Default: 1."),
    click.option(
        "-o",
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the result to this file instead of stdout.",
    ),
)


def prompt_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a sample to the group."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sample_prompt(invocation: Invocation, options: Mapping[str, Any]) -> None:
    """Samples from a prompt and prints each sample with its stop reason and mean logprob."""
    prompt, file, output = options["prompt"], options["prompt_file"], options["output"]
    if (prompt is None) == (file is None):
        raise click.UsageError("give exactly one of --prompt and --prompt-file")
    if options["base_model"] is not None and options["model_path"] is not None:
        raise click.UsageError("give --base-model or --model-path, not both")
    content: Prompt = prompt if file is None else read_prompt_file(file)
    if not content:
        raise click.UsageError("the prompt is empty")
    if as_messages(content) is not None:
        raise click.UsageError(
            f"{file} holds messages, and this command sends prompts unchanged; use: tinkex sample --file {file}"
        )
    from tinkex import types
    from tinkex.cli.base_model import choose_base_model

    given = {name: options[name] for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")}
    try:
        params = types.SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with invocation.service("run") as service:
        if options["model_path"] is not None:
            sampler = service.create_sampling_client(model_path=options["model_path"])
        else:
            model = choose_base_model(service, options["base_model"])
            sampler = service.create_sampling_client(base_model=model)
        tokens = as_tokens(content) or sampler.get_tokenizer().encode(str(content))
        invocation.status("Starting sampling...")
        sampling = sampler.sample(types.ModelInput.from_ints(tokens), options["num_samples"] or 1, params)
        response = invocation.wait(sampling, "the sample")
        if invocation.as_json:
            from tinkex.cli.render import as_json
            from tinkex.types.sampling import sample_response_as_json

            text = as_json(sample_response_as_json(response))
        else:
            text = "\n\n".join(
                f"Sample {number}:\n{_shown(sampler, one)}"
                for number, one in enumerate(response.sequences, 1)
            )
    invocation.write(text, output)


def _shown(sampler: SamplingClient, sequence: SampledSequence) -> str:
    try:
        text = sampler.get_tokenizer().decode(sequence.tokens, skip_special_tokens=True)
    except TinkexError as error:  # the sample is worth more than its text
        text = f"[decode error: {error}]"
    logprobs = sequence.logprobs
    mean = f"{sum(logprobs) / len(logprobs):.4f}" if logprobs else "n/a"
    return f"{text}\nstop_reason={sequence.stop_reason} | avg_logprob={mean}"
