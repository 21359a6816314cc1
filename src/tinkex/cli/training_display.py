"""Progress output of ``tinkex train``: a live line, and a line per evaluation and checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinkex.observability.terminal import TrainingLine
from tinkex.train import TrainingCallback

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation

__all__ = ["TrainingDisplay"]


class TrainingDisplay(TrainingCallback):
    """Shows the progress of a run on stderr; silent with ``--quiet`` and ``--json``."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation
        self._line: TrainingLine | None = None
        self._headline = "loss"

    def started(self, total_steps: int, first_step: int, headline: str) -> None:
        """Starts the live line."""
        self._headline = headline
        if first_step:
            self._invocation.status(f"Resuming after step {first_step} of {total_steps}")
        if not (self._invocation.quiet or self._invocation.as_json):
            self._line = TrainingLine(total_steps, sys.stderr, first_step=first_step, label=headline)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Updates the live line."""
        del step
        if self._line is not None:
            self._line.update(loss=metrics[self._headline], num_tokens=int(metrics.get("num_tokens", 0)))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics on one line."""
        formatted = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self._print(f"evaluation after step {step}: {formatted}")

    def saved(self, step: int, path: str) -> None:
        """Prints the path on one line."""
        self._print(f"checkpoint after step {step}: {path}")

    def stopping(self, steps: int) -> None:
        """Prints what the shutdown waits for, which may take a while."""
        first = f"finishing {steps} steps in flight, then " if steps else ""
        self._print(f"Stopping: {first}saving the state. Ctrl-C again exits immediately without saving.")

    def finished(self) -> None:
        """Ends the live line."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _print(self, text: str) -> None:
        if self._line is not None:
            self._line.interrupt()
        self._invocation.status(text)
