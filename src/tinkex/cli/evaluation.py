"""What ``tinkex eval`` does: check, evaluate, compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from tinkex.cli.progress import count_bar
from tinkex.cli.sampling_options import SAMPLING_NAMES, read_params
from tinkex.errors import SetupError
from tinkex.evaluation import EvaluationOptions, Score, Task, TaskResult, evaluate, read_task, summarize
from tinkex.evaluation.lm_eval_tasks import LmEvalOptions, LmEvalTasks, lm_eval_scores, read_lm_eval_tasks

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation
    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient

__all__ = ["print_scores", "run_evaluation"]

COLUMNS = ("Task", "Metric", "Model", "Score", "95 % interval", "Items", "Change", "95 % interval of it")


@dataclass(frozen=True)
class EvaluatedModel:
    """A model of the table."""

    name: str
    """A base model or the path of a checkpoint."""
    sampler: SamplingClient


def run_evaluation(invocation: Invocation, options: Mapping[str, Any], explicit: AbstractSet[str]) -> None:
    """Checks tasks, options and the output file, then opens the models one after the other, and prints the table."""
    tasks = [read_task(file, options["scorer"]) for file in options["tasks"]]
    _check_names(tasks)
    _check_sampling(tasks, options, explicit)
    names = [name.strip() for name in (options["lm_eval_tasks"] or "").split(",") if name.strip()]
    lm_eval = read_lm_eval_tasks(names, options["lm_eval_path"]) if names else None
    how = EvaluationOptions(read_params(options), options["num_samples"], options["chat"], options["limit"])
    with ExitStack() as stack:
        output = _open_output(stack, options["output"])
        service = stack.enter_context(invocation.service("eval"))
        scores = _run(invocation, service, _model_names(service, options), tasks, lm_eval, how, output)
    if options["output"] is not None:
        invocation.status(f"Wrote {options['output']}")
    print_scores(invocation, scores, {"seed": how.params.seed, "limit": how.limit})


def print_scores(invocation: Invocation, scores: Sequence[Score], more: Mapping[str, Any]) -> None:
    """Prints scores as a table, or with ``--json`` as an object that also has the fields of ``more``."""
    rows = [
        [
            score.task,
            score.metric,
            score.model,
            f"{score.value:.3f}",
            "" if score.interval is None else str(score.interval),
            str(score.num_items),
            "" if score.change is None else f"{score.change:+.3f}",
            "" if score.change_interval is None else str(score.change_interval),
        ]
        for score in scores
    ]
    shown = [place for place in range(len(COLUMNS)) if place < 6 or any(row[place] for row in rows)]
    invocation.table(
        {"results": [score.as_json() for score in scores], **more},
        [COLUMNS[place] for place in shown],
        [[row[place] for place in shown] for row in rows],
    )


def _run(
    invocation: Invocation,
    service: ServiceClient,
    names: Sequence[str],
    tasks: Sequence[Task],
    lm_eval: LmEvalTasks | None,
    how: EvaluationOptions,
    output: TextIO | None,
) -> list[Score]:
    results: list[TaskResult] = []
    others: list[Score] = []
    for name in names:
        sampler = open_sampler(service, name)
        for task in tasks:
            results.append(evaluate_on(invocation, task, name, sampler, how))
            _write(output, _records(results[-1]))
        if lm_eval is not None:
            invocation.status(f"{', '.join(lm_eval.names)} on {name}")
            found, records = lm_eval_scores(lm_eval, name, sampler, _lm_eval_options(service, sampler, how))
            others += found
            _write(output, records)
    return [*summarize(results), *_compared(others)]


def evaluate_on(
    invocation: Invocation, task: Task, name: str, sampler: SamplingClient, how: EvaluationOptions
) -> TaskResult:
    """Evaluates a model on a task and shows the progress."""
    count = len(task.items[: how.limit])
    invocation.status(f"{task.name} on {name}: {count} item{'' if count == 1 else 's'}")
    with count_bar(invocation, task.name, count) as advance:
        return evaluate(task, name, sampler, how, advance)


def open_sampler(service: ServiceClient, name: str) -> SamplingClient:
    """Opens a base model, or a checkpoint by its path."""
    if name.startswith("tinker://"):
        return service.create_sampling_client(model_path=name).result()
    return service.create_sampling_client(base_model=name).result()


def _model_names(service: ServiceClient, options: Mapping[str, Any]) -> list[str]:
    """The models in the order of the table: base models, then checkpoints."""
    from tinkex.cli.base_model import choose_base_model

    models, paths = list(options["models"]), list(options["model_paths"])
    if options["compare"]:
        rest = service.create_rest_client()
        models += [rest.get_weights_info_by_tinker_path(path).result().base_model for path in paths]
    elif not models and not paths:
        models = [choose_base_model(service, None)]
    return [*dict.fromkeys(models), *paths]


def _lm_eval_options(
    service: ServiceClient, sampler: SamplingClient, how: EvaluationOptions
) -> LmEvalOptions:
    supported = service.get_server_capabilities().supported_models
    contexts = {model.model_name: model.max_context_length for model in supported}
    return LmEvalOptions(
        limit=how.limit,
        seed=how.params.seed or 0,
        chat=bool(how.chat),
        max_context=contexts.get(str(sampler.get_base_model())),
    )


def _compared(scores: Sequence[Score]) -> list[Score]:
    """Scores of lm-eval, task by task, with the change against the first model; it has no interval."""
    compared: list[Score] = []
    for key in dict.fromkeys((score.task, score.metric) for score in scores):
        first, *rest = [score for score in scores if (score.task, score.metric) == key]
        compared += [first, *(replace(score, change=score.value - first.value) for score in rest)]
    return compared


def _check_names(tasks: Sequence[Task]) -> None:
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise click.UsageError(f"two task files are named {twice!r}; rename one, so that the table is clear")


def _check_sampling(tasks: Sequence[Task], options: Mapping[str, Any], explicit: AbstractSet[str]) -> None:
    """Rejects options of sampled answers if none are sampled, and structured output that tasks would not survive."""
    given = sorted(explicit & {*SAMPLING_NAMES, "num_samples", "scorer"} - {"seed"})
    if given and not any(task.samples_answers for task in tasks):
        raise click.UsageError(
            f"--{given[0].replace('_', '-')} is for sampled answers, and no task file here samples any"
        )
    if options["num_samples"] > 1 and options["temperature"] == 0:
        raise click.UsageError("-n samples the same answer each time at temperature 0; set --temperature")


def _open_output(stack: ExitStack, file: Path | None) -> TextIO | None:
    if file is None:
        return None
    try:
        return stack.enter_context(file.open("w", encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"{file} cannot be written ({error.strerror}); choose another file") from error


def _records(result: TaskResult) -> Iterable[dict[str, Any]]:
    for number, item in enumerate(result.items):
        yield {"task": result.task, "model": result.model, "item": number, **item.scores, **item.details}


def _write(output: TextIO | None, records: Iterable[Mapping[str, Any]]) -> None:
    if output is not None:
        for record in records:
            output.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        output.flush()
