"""``tinkex train``: supervised fine-tuning, preferences or rewards; the recipes are in :mod:`tinkex.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinkex.cli.groups import CommandGroup
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paths import CheckpointPath
from tinkex.errors import ConfigError

if TYPE_CHECKING:
    from tinkex.train import Settings

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
POSITIVE = click.IntRange(min=1)


def recipe_options(learning_rate: float, epochs: int, schedule: str) -> Callable[[Command], Command]:
    """Adds the options that all recipes take, with the defaults of this recipe."""
    options = [
        click.argument("data", type=FILE, required=False),
        click.option("--model", help="Base model. Default: the server's only model, or SmolLM2-135M-Instruct if the server has it."),
        click.option("--model-path", type=CheckpointPath("weights"), help="Start from this checkpoint instead of a base model."),
        click.option("-o", "--output", type=FOLDER, help="Directory of the run. Default: ./tinkex-runs/<recipe>-<time>."),
        click.option("--resume", type=FOLDER, metavar="DIRECTORY", help="Resume the run in this directory with its settings."),
        click.option("--rank", type=POSITIVE, default=16, show_default=True, help="LoRA rank of the adapter."),
        click.option("--learning-rate", type=float, default=learning_rate, show_default=True, help="Peak learning rate."),
        click.option("--schedule", type=click.Choice(["constant", "linear", "cosine"]), default=schedule,
                     show_default=True, help="Learning rate schedule."),
        click.option("--warmup-steps", type=click.IntRange(min=0), default=0, show_default=True, help="Steps of linear warmup to the peak learning rate."),
        click.option("--batch-size", type=POSITIVE, default=4, show_default=True, help="Examples per step."),
        click.option("--epochs", type=POSITIVE, default=epochs, show_default=True, help="Number of passes over the data."),
        click.option("--steps", type=POSITIVE, help="Total number of steps, instead of --epochs."),
        click.option("--max-length", type=POSITIVE, default=1024, show_default=True, help="Maximum tokens per example."),
        click.option("--too-long", type=click.Choice(["error", "skip", "cut"]), default="error", show_default=True,
                     help="What to do with longer examples: fail, skip or truncate."),
        click.option("--chat/--raw", default=None,
                     help="Format plain text as chat messages, or not. Default: --chat if the model has a chat template."),
        click.option("--eval-data", type=FILE, help="Evaluation data."),
        click.option("--eval-fraction", type=float, default=0.1, show_default=True,
                     help="Fraction of DATA held out for evaluation if there is no --eval-data."),
        click.option("--eval-every", type=POSITIVE, metavar="STEPS", help="Steps between evaluations. Default: one epoch."),
        click.option("--save-every", type=POSITIVE, metavar="STEPS", help="Steps between checkpoints. Default: save only at the end."),
        click.option("--ttl", "ttl_seconds", type=POSITIVE, metavar="SECONDS",
                     help="Delete intermediate checkpoints after this many seconds. Default: never."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of the adapter and of the data order."),
        click.option("--sample-prompt", "sample_prompts", multiple=True, metavar="TEXT",
                     help="Prompt to sample before and after training; repeatable. Default: three from the data."),
        click.option("--sample-tokens", type=POSITIVE, default=64, show_default=True, help="Maximum tokens of these samples."),
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(cls=CommandGroup)
def train() -> None:
    """Train an adapter on a JSON lines file.

    Training runs on this machine (--local) or on a server. The directory of a run holds its settings, metrics per step, checkpoint paths, and a final report with loss curve and samples.
    Ctrl-C saves the state; --resume continues from it.
    """


@train.command()
@recipe_options(learning_rate=1e-3, epochs=3, schedule="linear")
@click.option("--train-on", type=click.Choice(["last", "all"]), default="last", show_default=True,
              help="Assistant messages to train on: only the last, or all.")  # fmt: skip
@pass_invocation
def sft(invocation: Invocation, /, **options: Any) -> None:
    """Train on answers (supervised fine-tuning).

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
@recipe_options(learning_rate=2e-4, epochs=3, schedule="linear")
@click.option("--beta", type=float, default=0.1, show_default=True,
              help="Strength of the KL constraint to the initial model.")  # fmt: skip
@click.option("--sft-weight", type=float, default=1.0, show_default=True,
              help="Weight of the chosen answers' cross-entropy, which keeps their likelihood from falling.")  # fmt: skip
@pass_invocation
def dpo(invocation: Invocation, /, **options: Any) -> None:
    """Train on preferences (direct preference optimization).

    \b
    Every line of DATA has the form:
      {"prompt": "…", "chosen": "…", "rejected": "…"}
    where each value may also be a list of messages.

    \b
    Examples:
      tinkex train dpo examples/data/brief_answers.jsonl --local
      tinkex train dpo examples/data/brief_answers.jsonl --beta 0.2 --steps 50 --local
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    _train(invocation, "dpo", options)


@train.command()
@recipe_options(learning_rate=3e-4, epochs=3, schedule="constant")
@click.option(
    "--reward",
    metavar="FILE.PY:FUNCTION",
    help="Reward function; takes prompt, completion and example by name.",
)
@click.option(
    "--reward-regex",
    metavar="PATTERN",
    help="Reward 1 for answers that match this regular expression, 0 for others.",
)
@click.option(
    "--group-size",
    type=click.IntRange(min=2),
    default=8,
    show_default=True,
    help="Number of answers per prompt.",
)
@click.option(
    "--max-tokens", type=POSITIVE, default=64, show_default=True, help="Maximum tokens of an answer."
)
@click.option("--loss", type=click.Choice(["importance_sampling", "ppo", "cispo"]), default="importance_sampling",
              show_default=True, help="Policy loss.")  # fmt: skip
@click.option("--normalize-advantages/--no-normalize-advantages", default=True, show_default=True,
              help="Divide a group's advantages by their standard deviation.")  # fmt: skip
@pass_invocation
def grpo(invocation: Invocation, /, **options: Any) -> None:
    """Train on rewards (group relative policy optimization).

    \b
    Every line of DATA has a prompt and any fields that the reward needs:
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
        raise click.UsageError("give either DATA or --resume DIRECTORY")
    if directory is not None:
        _reject_settings()
    from tinkex.cli.training_display import TrainingDisplay
    from tinkex.train import resume, run

    with invocation.service(f"train {recipe}") as service:
        display = TrainingDisplay(invocation)
        settings: Settings | None = None
        if directory is None:
            from tinkex.cli.base_model import choose_base_model

            settings = _settings(recipe, data, options)
            if settings.start_from is None and settings.model is None:
                settings = _settings(recipe, data, {**options, "model": choose_base_model(service, None)})
            directory = settings.output
        invocation.interrupt_hint = (
            f"resume with: tinkex train {recipe} --resume {directory}{invocation.server_options}"
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
            invocation.status("(to save the curve as PNG: pip install 'tinkex[plots]')")
        click.echo(
            f'\nTry it: tinkex sample "…" --model-path {report.sampler_checkpoint}{invocation.server_options}'
        )


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


def _reject_settings() -> None:
    """Rejects options that a resumed run would ignore, because it uses the settings of its directory."""
    ctx = click.get_current_context()
    commandline = click.core.ParameterSource.COMMANDLINE
    shared = {"resume", "base_url", "local", "api_key", "as_json", "quiet"}
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in shared and ctx.get_parameter_source(name) is commandline:
            raise click.UsageError(f"a resumed run keeps its settings; remove {parameter.opts[0]}")
