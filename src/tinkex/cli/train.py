"""``tinkex train``: supervised fine-tuning, preferences or rewards; the recipes are in :mod:`tinkex.train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tinkex.cli.groups import CommandGroup
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paths import CheckpointPath

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
POSITIVE = click.IntRange(min=1)


def _parse_columns(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in (value or "").split(",") if pair.strip()]
    if any(not (name.strip() and column.strip()) for name, _, column in pairs):
        raise click.BadParameter("the form is NAME=COLUMN, such as prompt=title,completion=body")
    return {name.strip(): column.strip() for name, _, column in pairs}


def recipe_options(learning_rate: float, epochs: int, schedule: str) -> Callable[[Command], Command]:
    """Adds the options that all recipes take, with the defaults of this recipe."""
    options = [
        click.argument("data", type=click.Path(path_type=Path), required=False),
        click.option("--model", help="Base model. Default: the only model there is, or SmolLM2-135M-Instruct."),
        click.option("--model-path", type=CheckpointPath("weights", "external_weights"), help="Start from this checkpoint instead of a base model."),
        click.option("--columns", metavar="NAME=COLUMN,…", callback=_parse_columns,
                     help="Columns of DATA, such as prompt=title,completion=body. Default: recognised by their names."),
        click.option("--check", is_flag=True,
                     help="Check data, model and settings, print examples, tokens, steps, time and memory, and exit."),
        click.option("-o", "--output", type=FOLDER, help="Directory of the run. Default: ./tinkex-runs/<recipe>-<time>."),
        click.option("--resume", type=FOLDER, metavar="DIRECTORY", help="Resume the run in this directory with its settings."),
        click.option("--rank", type=POSITIVE, default=16, show_default=True, help="LoRA rank of the adapter."),
        click.option("--learning-rate", type=float, default=learning_rate, show_default=True, help="Peak learning rate."),
        click.option("--schedule", type=click.Choice(["constant", "linear", "cosine"]), default=schedule,
                     show_default=True, help="Learning rate schedule."),
        click.option("--warmup-steps", type=click.IntRange(min=0), default=0, show_default=True, help="Steps of linear warmup to the peak learning rate."),
        click.option("--batch-size", type=POSITIVE, default=4, show_default=True, help="Examples per batch."),
        click.option("--accumulate", type=POSITIVE, default=1, show_default=True, metavar="BATCHES",
                     help="Batches per step: their gradients are added before the optimizer step."),
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
        click.option("--eval-task", "eval_tasks", multiple=True, type=FILE, metavar="FILE",
                     help="Task file, as of 'tinkex eval', to score before and after training; repeatable."),
        click.option("--eval-every", type=POSITIVE, metavar="STEPS", help="Steps between evaluations. Default: one epoch."),
        click.option("--keep-best", is_flag=True, help="Keep the checkpoint with the best evaluation as the result, not the last one."),
        click.option("--early-stop", type=POSITIVE, metavar="EVALUATIONS",
                     help="Stop after this many evaluations without improvement. Default: train to the end."),
        click.option("--save-every", type=POSITIVE, metavar="STEPS", help="Steps between checkpoints. Default: save only at the end."),
        click.option("--ttl", "ttl_seconds", type=POSITIVE, metavar="SECONDS",
                     help="Expire after this many seconds. For the checkpoints of --save-every. Default: never."),
        click.option("--seed", type=int, default=0, show_default=True, help="Random seed for adapter and shuffling."),
        click.option("--sample-prompt", "sample_prompts", multiple=True, metavar="TEXT",
                     help="Prompt to sample before and after training; repeatable. Default: three from the data."),
        click.option("--sample-tokens", type=POSITIVE, default=64, show_default=True, help="Maximum new tokens of these samples."),
        click.option("--track", multiple=True, type=click.Choice(["tensorboard", "wandb", "trackio", "mlflow"]),
                     help="Also write the metrics to this experiment tracker; repeatable."),
        click.option("--report", is_flag=True, help="Also write report.html: one file with curves and samples, to mail."),
    ]  # fmt: skip

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(cls=CommandGroup, invoke_without_command=True, no_args_is_help=True)
@click.option(
    "--config",
    type=FILE,
    metavar="RUN.TOML",
    help="Run with the settings in this file; every run writes one.",
)
@click.option("-o", "--output", type=FOLDER, help="With --config: directory of the new run.")
@click.option("--check", is_flag=True, help="With --config: check everything, and exit.")
@click.option(
    "--report",
    type=FOLDER,
    metavar="DIRECTORY",
    help="Write report.html of the complete run in this directory.",
)
@pass_invocation
@click.pass_context
def train(
    ctx: click.Context,
    invocation: Invocation,
    /,
    config: Path | None,
    output: Path | None,
    check: bool,
    report: Path | None,
) -> None:
    """Train an adapter on your data.

    Training runs on this machine (--local) or on a server. The directory of a run holds its settings, metrics per step, checkpoint paths, and a final report with loss curve and samples.
    Ctrl-C saves the state; --resume continues from it.

    \b
    Examples:
      tinkex train sft examples/data/captains_log.jsonl --local
      tinkex train --config ./tinkex-runs/sft-20260731-120000/run.toml --local
      tinkex train --report ./tinkex-runs/sft-20260731-120000
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if ctx.invoked_subcommand is not None:
        if config is not None or output is not None or check or report is not None:
            raise click.UsageError(
                "give the options of a recipe after its name; --config and --report DIRECTORY need no recipe"
            )
        return
    if config is None and (output is not None or check):
        raise click.UsageError("--output and --check need --config RUN.TOML, or the name of a recipe")
    if config is not None and report is not None:
        raise click.UsageError("give --config or --report, not both; a config may contain report = true")
    if config is not None:
        from tinkex.cli.training import train_from_config

        train_from_config(invocation, config, output, check=check)
    elif report is not None:
        from tinkex.cli.training import write_report

        write_report(invocation, report)
    else:
        click.echo(ctx.get_help())


@train.command()
@recipe_options(learning_rate=1e-3, epochs=3, schedule="linear")
@click.option("--train-on", type=click.Choice(["last", "all"]), default="last", show_default=True,
              help="Assistant messages to train on: only the last, or all.")  # fmt: skip
@pass_invocation
def sft(invocation: Invocation, /, **options: Any) -> None:
    """Train on answers (supervised fine-tuning).

    \b
    DATA is a JSON lines, JSON, CSV or Parquet file, a dataset directory, or the name of a dataset of the Hub, with rows such as:
      {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
      {"prompt": "…", "completion": "…"}
      instruction/input/output, question/answer, ShareGPT conversations

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
    DATA has rows (JSON lines, JSON, CSV, Parquet, dataset) of the form:
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
    multiple=True,
    metavar="FILE.PY:FUNCTION[=WEIGHT]",
    help="Reward function; takes prompt, completion and example by name. Several are added, each times its weight.",
)
@click.option(
    "--reward-regex",
    multiple=True,
    metavar="PATTERN",
    help="Reward 1 for answers that match this regular expression, 0 for others; repeatable.",
)
@click.option(
    "--group-size",
    type=click.IntRange(min=2),
    default=8,
    show_default=True,
    help="Number of answers per prompt.",
)
@click.option(
    "--max-tokens", type=POSITIVE, default=64, show_default=True, help="Maximum new tokens of an answer."
)
@click.option("--loss", type=click.Choice(["importance_sampling", "ppo", "cispo"]), default="importance_sampling",
              show_default=True, help="Policy loss.")  # fmt: skip
@click.option("--normalize-advantages/--no-normalize-advantages", default=True, show_default=True,
              help="Divide a group's advantages by their standard deviation.")  # fmt: skip
@click.option("--kl-coef", type=float, default=0.0, show_default=True,
              help="Weight of the KL penalty on moving away from the initial model.")  # fmt: skip
@pass_invocation
def grpo(invocation: Invocation, /, **options: Any) -> None:
    """Train on rewards (group relative policy optimization).

    \b
    DATA has rows (JSON lines, JSON, CSV, Parquet, dataset) with a prompt and any fields that the reward needs:
      {"prompt": "What is 2 + 2?", "answer": "4"}

    \b
    Examples:
      tinkex train grpo prompts.jsonl --reward rewards.py:is_right --local
      tinkex train grpo prompts.jsonl --reward rewards.py:is_right --reward rewards.py:is_short=0.2 --kl-coef 0.05 --local
      tinkex train grpo examples/data/short_questions.jsonl --reward-regex '^.{1,40}$' --local
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    _train(invocation, "grpo", options)


def _train(invocation: Invocation, recipe: str, options: dict[str, Any]) -> None:
    data, directory, check = options.pop("data"), options.pop("resume"), options.pop("check")
    if (data is None) == (directory is None):
        raise click.UsageError("give either DATA or --resume DIRECTORY")
    if directory is not None:
        _reject_settings()
    invocation.status(f"Reading {data or directory}")  # before anything takes time
    from tinkex.cli.training import resume_run, train_on_file

    if directory is not None:
        resume_run(invocation, recipe, directory)
    else:
        train_on_file(invocation, recipe, data, options, check=check)


def _reject_settings() -> None:
    """Rejects options that a resumed run would ignore, because it uses the settings of its directory."""
    ctx = click.get_current_context()
    commandline = click.core.ParameterSource.COMMANDLINE
    shared = {"resume", "base_url", "local", "api_key", "timeout", "as_json", "quiet"}
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in shared and ctx.get_parameter_source(name) is commandline:
            raise click.UsageError(f"a resumed run keeps its settings; remove {parameter.opts[0]}")
