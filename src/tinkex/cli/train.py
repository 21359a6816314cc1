"""``tinkex train``: supervised, by preferences, or by rewards; the recipes themselves are in :mod:`tinkex.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinkex.cli.groups import Noun
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paths import CheckpointPath
from tinkex.errors import ConfigError

if TYPE_CHECKING:
    from tinkex.train import Settings

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
POSITIVE = click.IntRange(min=1)


def common(learning_rate: float, epochs: int, schedule: str) -> Callable[[Command], Command]:
    """The options all recipes take, with their defaults for this one."""
    options = [
        click.argument("data", type=FILE, required=False),
        click.option("--model", help="Base model. Default: the server's only one, or the small one for laptops."),
        click.option("--model-path", type=CheckpointPath("weights"), help="Start from this checkpoint instead."),
        click.option("-o", "--output", type=FOLDER, help="Where the run is kept. Default: ./tinkex-runs/<recipe>-<time>."),
        click.option("--resume", type=FOLDER, metavar="DIRECTORY", help="Go on with a run; all settings are its own."),
        click.option("--rank", type=POSITIVE, default=16, show_default=True, help="Rank of the adapter."),
        click.option("--learning-rate", type=float, default=learning_rate, show_default=True, help="The learning rate at its highest."),
        click.option("--schedule", type=click.Choice(["constant", "linear", "cosine"]), default=schedule,
                     show_default=True, help="How the learning rate falls."),
        click.option("--warmup-steps", type=click.IntRange(min=0), default=0, show_default=True, help="Steps in which it rises to that."),
        click.option("--batch-size", type=POSITIVE, default=4, show_default=True, help="Examples per step."),
        click.option("--epochs", type=POSITIVE, default=epochs, show_default=True, help="Passes over the data."),
        click.option("--steps", type=POSITIVE, help="Steps in all, instead of --epochs."),
        click.option("--max-length", type=POSITIVE, default=1024, show_default=True, help="Most tokens of an example."),
        click.option("--too-long", type=click.Choice(["error", "skip", "cut"]), default="error", show_default=True,
                     help="What is done with longer ones."),
        click.option("--chat/--raw", default=None,
                     help="Send plain texts as chat messages, or as they are. Default: --chat where there is a template."),
        click.option("--eval-data", type=FILE, help="File to evaluate on."),
        click.option("--eval-fraction", type=float, default=0.1, show_default=True,
                     help="Part of DATA to evaluate on, without --eval-data."),
        click.option("--eval-every", type=POSITIVE, metavar="STEPS", help="How often it is evaluated. Default: after every epoch."),
        click.option("--save-every", type=POSITIVE, metavar="STEPS", help="How often a checkpoint is saved. Default: only at the end."),
        click.option("--ttl", "ttl_seconds", type=POSITIVE, metavar="SECONDS",
                     help="How long checkpoints on the way are kept. Default: for good."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the adapter and the order of the data."),
        click.option("--sample-prompt", "sample_prompts", multiple=True, metavar="TEXT",
                     help="Prompt to answer before and after; repeatable. Default: three of the data."),
        click.option("--sample-tokens", type=POSITIVE, default=64, show_default=True, help="Most tokens of these answers."),
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(cls=Noun)
def train() -> None:
    """Train an adapter from a file of JSON lines.

    It is trained on this machine (--local) or on any server. A run is kept in a directory: settings, a line per step, checkpoints, and at the end a report with curve and samples.
    Ctrl-C saves the state; --resume goes on from there.
    """


@train.command()
@common(learning_rate=1e-3, epochs=3, schedule="linear")
@click.option("--train-on", type=click.Choice(["last", "all"]), default="last", show_default=True,
              help="Which of the assistant's messages are learned.")  # fmt: skip
@pass_invocation
def sft(invocation: Invocation, /, **options: Any) -> None:
    """Teach a model the answers in DATA.

    \b
    Every line of DATA is one of:
      {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
      {"prompt": "…", "completion": "…"}

    \b
    Examples:
      tinkex train sft examples/data/captains_log.jsonl --local
      tinkex train sft chats.jsonl --model Qwen/Qwen3-8B --epochs 1 --learning-rate 2e-4
      tinkex train sft --resume ./tinkex-runs/sft-20260731-120000
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    _train(invocation, "sft", options)


@train.command()
@common(learning_rate=2e-4, epochs=3, schedule="linear")
@click.option("--beta", type=float, default=0.1, show_default=True,
              help="How close the model stays to where it starts: the larger, the closer.")  # fmt: skip
@click.option("--sft-weight", type=float, default=1.0, show_default=True,
              help="Weight of the chosen answers' cross-entropy, which keeps them from becoming unlikely too.")  # fmt: skip
@pass_invocation
def dpo(invocation: Invocation, /, **options: Any) -> None:
    """Make the chosen answers in DATA likelier than the rejected ones.

    \b
    Every line of DATA is like:
      {"prompt": "…", "chosen": "…", "rejected": "…"}
    where each may also be a list of messages.

    \b
    Example:
      tinkex train dpo examples/data/brief_answers.jsonl --local
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    _train(invocation, "dpo", options)


@train.command()
@common(learning_rate=3e-4, epochs=3, schedule="constant")
@click.option(
    "--reward", metavar="FILE.PY:FUNCTION", help="Function of prompt, completion and example (by name)."
)
@click.option("--reward-regex", metavar="PATTERN", help="Answers in which it is found are worth 1, others 0.")
@click.option(
    "--group-size", type=click.IntRange(min=2), default=8, show_default=True, help="Answers per prompt."
)
@click.option("--max-tokens", type=POSITIVE, default=64, show_default=True, help="Most tokens of an answer.")
@click.option("--loss", type=click.Choice(["importance_sampling", "ppo", "cispo"]), default="importance_sampling",
              show_default=True, help="How the policy is improved.")  # fmt: skip
@click.option("--normalize-advantages/--no-normalize-advantages", default=True, show_default=True,
              help="Divide a group's advantages by their standard deviation.")  # fmt: skip
@pass_invocation
def grpo(invocation: Invocation, /, **options: Any) -> None:
    """Make answers with higher rewards likelier. They are compared within groups of answers to one prompt.

    \b
    Every line of DATA has a prompt, and what the reward needs:
      {"prompt": "What is 2 + 2?", "answer": "4"}

    \b
    Examples:
      tinkex train grpo prompts.jsonl --reward rewards.py:is_right --local
      tinkex train grpo examples/data/short_questions.jsonl --reward-regex '^.{1,40}$' --local
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    _train(invocation, "grpo", options)


def _train(invocation: Invocation, recipe: str, options: dict[str, Any]) -> None:
    data, directory = options.pop("data"), options.pop("resume")
    if (data is None) == (directory is None):
        raise click.UsageError("give the file of examples, or --resume DIRECTORY; not both, not neither")
    if directory is not None:
        _refuse_settings()
    from tinkex.cli.training_display import Display
    from tinkex.train import resume, run

    with invocation.service(f"train {recipe}") as service:
        display = Display(invocation)
        settings: Settings | None = None
        if directory is None:
            from tinkex.cli.base_model import chosen_base_model

            settings = _settings(recipe, data, options)
            if settings.start_from is None and settings.model is None:
                settings = _settings(recipe, data, {**options, "model": chosen_base_model(service, None)})
            directory = settings.output
        invocation.if_interrupted = (
            f"go on with: tinkex train {recipe} --resume {directory}{invocation.where}"
        )
        if settings is not None:
            report = run(service, settings, display)
        else:
            report = resume(service, directory, display, recipe=recipe)
    if invocation.as_json:
        invocation.json(report.as_json())
    else:
        click.echo(report.text)
        click.echo(f"Report              {report.output}")
        if not (report.output / "curve.png").exists():
            invocation.remark("(for the curve as a picture too: pip install 'tinkex[plots]')")
        click.echo(f'\nTry it: tinkex sample "…" --model-path {report.sampler_checkpoint}{invocation.where}')


def _settings(recipe: str, data: Path, options: Mapping[str, Any]) -> Settings:
    import time

    from tinkex.train.settings import RECIPES

    values = {**options, "data": data, "start_from": options["model_path"]}
    del values["model_path"]
    if values["model"] is not None and values["start_from"] is not None:
        raise click.UsageError("give --model or --model-path, not both")
    if values["output"] is None:
        values["output"] = Path("tinkex-runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        return RECIPES[recipe](**values)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _refuse_settings() -> None:
    """A resumed run has its own settings; others would silently change nothing."""
    ctx = click.get_current_context()
    commandline = click.core.ParameterSource.COMMANDLINE
    shared = {"resume", "base_url", "local", "api_key", "as_json", "quiet"}
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in shared and ctx.get_parameter_source(name) is commandline:
            raise click.UsageError(f"a resumed run keeps its settings; leave out {parameter.opts[0]}")
