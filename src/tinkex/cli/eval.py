"""``tinkex eval``: scores of models on tasks, beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.cli.paths import CheckpointPath
from tinkex.cli.sampling_options import check_stops, sampling_options


@click.command("eval", cls=Leaf)
@click.argument("tasks", nargs=-1, metavar="[TASK]...", type=click.Path(path_type=Path))
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Base model; repeatable. Default: the server's only model, or SmolLM2-135M-Instruct.",
)
@click.option(
    "--model-path", "model_paths", multiple=True, type=CheckpointPath(), help="Checkpoint; repeatable."
)
@click.option("--compare", is_flag=True, help="Evaluate the base models of the checkpoints too, first.")
@click.option(
    "--scorer",
    metavar="FILE.PY:FUNCTION",
    help="Score sampled answers with this function; takes prompt, completion and example by name.",
)
@click.option(
    "--lm-eval", "lm_eval_tasks", metavar="NAME,…", help="Tasks of lm-eval, which must be installed."
)
@click.option(
    "--lm-eval-path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of further tasks for lm-eval.",
)
@click.option(
    "--chat/--raw",
    default=None,
    help="Send text prompts as messages, or unchanged. Default: --chat if the model has a chat template; "
    "--raw for lm-eval.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Use the first items of each task only.")
@sampling_options(max_tokens=64, temperature=0.0, seed=0)
@click.option(
    "-n",
    "--num-samples",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Answers per item; its score is their mean.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result of every item to this file, as JSON lines.",
)
@pass_invocation
def evaluate(invocation: Invocation, /, **options: Any) -> None:
    """Evaluate models on tasks, and compare them.

    \b
    A TASK is a JSON lines, JSON, CSV or Parquet file. An item has a prompt, or messages, and one of:
      {"prompt": "2 + 2 =", "answer": "4"}                      exact match; a list accepts several answers
      {"prompt": "Name a colour.", "pattern": "red|green"}      the answer contains a match
      {"prompt": "The sea is", "choices": [" wet", " dry"], "answer": 0}
                                                                multiple choice, by the logprobs of the choices
    or any fields that a function of yours needs (--scorer).

    The table has the mean score with its 95 % confidence interval (Wilson for scores of 0 and 1, bootstrap for others), and the change against the first model.

    \b
    Examples:
      tinkex eval sums.jsonl --local
      tinkex eval sums.jsonl --model-path @last --compare --json
      tinkex eval --lm-eval arc_easy --limit 100 --model Qwen/Qwen3-8B
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    if not options["tasks"] and options["lm_eval_tasks"] is None:
        raise click.UsageError("no task; give a file, or --lm-eval NAME")
    if options["lm_eval_path"] is not None and options["lm_eval_tasks"] is None:
        raise click.UsageError("--lm-eval-path needs --lm-eval")
    if options["scorer"] is not None and not options["tasks"]:
        raise click.UsageError("--scorer needs a task file")
    if options["compare"] and not options["model_paths"]:
        raise click.UsageError("--compare needs a checkpoint beside its base model; add --model-path")
    for name in ("models", "model_paths"):
        if len(set(options[name])) < len(options[name]):
            raise click.UsageError(f"--{name.removesuffix('s').replace('_', '-')} names a model twice")
    check_stops(options)
    given = click.get_current_context().get_parameter_source
    explicit = frozenset(name for name in options if given(name) is click.core.ParameterSource.COMMANDLINE)
    invocation.status("Reading the tasks")  # before anything takes time
    from tinkex.cli.evaluation import run_evaluation

    run_evaluation(invocation, options, explicit)
