"""What ``tinkex train`` shows while it works: one live line, and a line per evaluation and checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinkex.observability.terminal import TrainingLine
from tinkex.train import TrainingCallback

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation

__all__ = ["Display"]


class Display(TrainingCallback):
    """Shows a run on stderr, unless ``--quiet`` or ``--json`` say otherwise."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation
        self._line: TrainingLine | None = None
        self._headline = "loss"

    def started(self, total_steps: int, first_step: int, headline: str) -> None:
        """Begins the live line."""
        self._headline = headline
        if first_step:
            self._invocation.remark(f"Going on after step {first_step} of {total_steps}")
        if not (self._invocation.quiet or self._invocation.as_json):
            self._line = TrainingLine(total_steps, sys.stderr, first_step=first_step, label=headline)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the live line on."""
        del step
        if self._line is not None:
            self._line.update(loss=metrics[self._headline], num_tokens=int(metrics.get("num_tokens", 0)))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line with the numbers."""
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self._say(f"evaluation after step {step}: {numbers}")

    def saved(self, step: int, path: str) -> None:
        """One line with the path."""
        self._say(f"checkpoint after step {step}: {path}")

    def stopping(self, steps: int) -> None:
        """Says what is waited for, which may take a while."""
        first = f"after {steps} steps that are under way " if steps else ""
        self._say(f"Stopping: {first}the state is saved. Ctrl-C again stops at once, unsaved.")

    def finished(self) -> None:
        """Ends the live line."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _say(self, text: str) -> None:
        if self._line is not None:
            self._line.interrupt()
        self._invocation.remark(text)
