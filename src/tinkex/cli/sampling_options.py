"""The options of commands that sample, and the sampling parameters that they set."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.prompt_file import read_text_file
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from typing import TypeAlias

    from tinkex.types import SamplingParams, StructuredOutput

    BiasType: TypeAlias = click.ParamType[tuple[int, float]]
else:
    BiasType = click.ParamType

__all__ = ["SAMPLING_NAMES", "check_stops", "read_params", "sampling_options"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class LogitBias(BiasType):
    """A token id and what is added to its logit: ``198=-100``."""

    name = "ID=BIAS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Returns the token id and the bias."""
        token, _, bias = str(value).partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id and a number, such as 198=-100", param, ctx)


def _core_options(max_tokens: int, temperature: float) -> tuple[Callable[..., Any], ...]:
    """The options that every server has, with the defaults of a command."""
    return (
        click.option("--max-tokens", type=click.IntRange(min=1), default=max_tokens, show_default=True,
                     help="Maximum new tokens."),
        click.option("--temperature", type=float, default=temperature, show_default=True,
                     help="Sampling temperature; 0 is greedy."),
        click.option("--top-k", type=int, default=-1, show_default=True,
                     help="Sample from the top k tokens; -1 disables it."),
        click.option("--top-p", type=float, default=1.0, show_default=True,
                     help="Sample from the smallest set of tokens with this probability mass; 1 disables it."),
    )  # fmt: skip


_STOPS = (
    click.option("--stop", "stops", multiple=True, metavar="TEXT", help="Stop after this text; repeatable."),
    click.option(
        "--stop-token", "stop_tokens", type=int, multiple=True, help="Stop after this token id; repeatable."
    ),
)

_EXTENSIONS = (
    click.option(
        "--min-p",
        type=float,
        help="Sample from tokens with at least this fraction of the highest probability. Default: 0, all.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        help="Subtract this from the logit of every token sampled before; -2 to 2. Default: 0.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        help="Subtract this from a token's logit for each time it was sampled; -2 to 2. Default: 0.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Divide the logits of tokens of prompt and output by this; above 1 discourages them. Default: 1.",
    ),
    click.option(
        "--logit-bias",
        type=LogitBias(),
        multiple=True,
        help="Add a number of -100 to 100 to the logit of a token id; repeatable.",
    ),
    click.option(
        "--json-schema",
        type=_FILE,
        help="Sample JSON that is valid under the schema in this file; a file with 'true' allows any object.",
    ),
    click.option("--regex", help="Sample text that this regular expression matches as a whole."),
    click.option(
        "--grammar", type=_FILE, help="Sample text of the grammar in this file, in the Lark format."
    ),
)


SAMPLING_NAMES = frozenset(
    {
        "max_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "json_schema", "regex", "grammar", "seed", "stops", "stop_tokens",
    }
)  # fmt: skip
"""The parameters of commands that have these options."""


def sampling_options(
    *, max_tokens: int, temperature: float, seed: int | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the options to a command, with its defaults; the default of the seed is a random one."""
    seed_option = (
        click.option("--seed", type=int, help="Random seed. Default: random.")
        if seed is None
        else click.option("--seed", type=int, default=seed, show_default=True, help="Random seed.")
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([*_core_options(max_tokens, temperature), *_EXTENSIONS, seed_option, *_STOPS]):
            command = option(command)
        return command

    return decorate


def check_stops(options: Mapping[str, Any]) -> None:
    """Rejects stop texts together with stop tokens."""
    if options["stops"] and options["stop_tokens"]:
        raise click.UsageError("give --stop or --stop-token, not both")


def read_params(options: Mapping[str, Any]) -> SamplingParams:
    """Returns the parameters that the options set; a value that is out of range is a usage error."""
    from tinkex.types import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "min_p",
             "presence_penalty", "frequency_penalty", "repetition_penalty")  # fmt: skip
    stop: list[str | int] = [*options["stops"], *options["stop_tokens"]]
    try:
        return SamplingParams(
            **{name: options[name] for name in names},
            stop=stop or None,
            logit_bias=dict(options["logit_bias"]) or None,
            structured_output=_structured_output(options),
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _structured_output(options: Mapping[str, Any]) -> StructuredOutput | None:
    from tinkex.types import StructuredOutput

    given = [name for name in ("json_schema", "regex", "grammar") if options[name] is not None]
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"give one of {names}")
    value = options[given[0]]
    if given[0] == "regex":
        return StructuredOutput(regex=value)
    text = read_text_file(value)
    if given[0] == "grammar":
        return StructuredOutput(grammar=text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{value} is not JSON ({error}); write the schema as JSON") from error
    if not isinstance(schema, dict) and schema is not True:
        raise SetupError(f"{value} is not a JSON schema; write an object, or true for any JSON object")
    return StructuredOutput(json_schema=schema)
