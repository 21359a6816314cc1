"""The tasks of ``tinkex train --eval-task``: scores of the model that a run starts from, and of its result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.evaluation import evaluate_on, open_sampler, print_scores
from tinkex.evaluation import EvaluationOptions, TaskResult, read_task, summarize

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation
    from tinkex.clients.service import ServiceClient
    from tinkex.evaluation import Score
    from tinkex.train import TrainingReport
    from tinkex.train.settings import Settings

__all__ = ["TrainingTasks"]

FILE = "eval_tasks.json"
"""The scores, in the directory of the run."""


class TrainingTasks:
    """The tasks of a run; without ``eval_tasks`` in its settings it does nothing. Reading them validates the files."""

    def __init__(self, invocation: Invocation, settings: Settings) -> None:
        self._invocation = invocation
        self._settings = settings
        self._tasks = [read_task(file) for file in settings.eval_tasks]
        self._before: Sequence[TaskResult] = ()
        self._scores: Sequence[Score] = ()

    def evaluate_start(self, service: ServiceClient, base_model: str | None = None) -> None:
        """Evaluates the model that the run starts from."""
        name = self._settings.start_from or self._settings.model or base_model
        assert name is not None, "a run has a model"
        self._before = self._evaluate(service, name)

    def evaluate_result(self, service: ServiceClient, report: TrainingReport) -> None:
        """Evaluates the result of the run, and the model it started from if that was not done before."""
        if not self._tasks:
            return
        if not self._before:  # the run was resumed
            self.evaluate_start(service, report.base_model)
        self._scores = summarize([*self._before, *self._evaluate(service, report.sampler_checkpoint)])
        _write(report.output / FILE, self.as_json())

    def print_table(self) -> None:
        """Prints the comparison."""
        if self._scores:
            print_scores(self._invocation, self._scores, {})

    def as_json(self) -> dict[str, Any]:
        """Returns what the comparison adds to the report of the run."""
        return {"eval_tasks": [score.as_json() for score in self._scores]} if self._scores else {}

    def _evaluate(self, service: ServiceClient, name: str) -> list[TaskResult]:
        if not self._tasks:
            return []
        sampler, options = open_sampler(service, name), EvaluationOptions(chat=self._settings.chat)
        return [evaluate_on(self._invocation, task, name, sampler, options) for task in self._tasks]


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
