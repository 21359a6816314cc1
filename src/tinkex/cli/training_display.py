"""Progress output of ``tinkex train``: a live line, and a line per evaluation and checkpoint."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.observability.terminal import LoadingLine, TrainingLine, counts, is_live
from tinkex.train import TrainingCallback

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation

__all__ = ["TrainingDisplay"]


class TrainingDisplay(TrainingCallback):
    """Shows the progress of a run on stderr; silent with ``--quiet`` and ``--json``."""

    def __init__(self, invocation: Invocation, recipe: str) -> None:
        self._invocation = invocation
        self._recipe = recipe
        self._silent = invocation.quiet or invocation.as_json
        self._line: TrainingLine | None = None
        self._phase = LoadingLine(sys.stderr, counts)
        self._headline = "loss"
        self._has_stepped = False

    def data_read(self, description: str) -> None:
        """Prints what was read."""
        self._print(description)

    def created(self, directory: Path) -> None:
        """Prints the directory; from now on Ctrl-C says how to resume."""
        self._print(f"run in {directory}")
        self.advise_resuming(directory)

    def advise_resuming(self, directory: Path) -> None:
        """Says how to resume the run after a Ctrl-C or a failure of the server."""
        options = f"--resume {shlex.quote(str(directory))}{self._invocation.server_options}"
        self._invocation.interrupt_hint = f"Resume with: tinkex train {self._recipe} {options}"

    def working(self, phase: str, done: int, total: int) -> None:
        """Shows the phase; off a terminal only before the first step, once per phase."""
        if not self._silent and (is_live(sys.stderr) or not self._has_stepped):
            self._phase.show(phase, done, total)

    def started(self, total_steps: int, first_step: int, headline: str) -> None:
        """Starts the live line."""
        self._headline = headline
        if first_step:
            self._print(f"Resuming after step {first_step} of {total_steps}")
        self._phase.clear()
        if not self._silent:
            self._line = TrainingLine(total_steps, sys.stderr, first_step=first_step, label=headline)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Updates the live line."""
        del step
        self._has_stepped = True
        if self._line is not None:
            self._line.update(loss=metrics[self._headline], num_tokens=int(metrics.get("num_tokens", 0)))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics on one line."""
        formatted = "  ".join(f"eval {name} {round(value, 3) + 0.0:.3f}" for name, value in metrics.items())
        self._print(f"after step {step}: {formatted}" if step else f"before training: {formatted}")

    def saved(self, step: int, path: str) -> None:
        """Prints the path on one line."""
        self._print(f"checkpoint after step {step}: {path}")

    def stopping(self, steps: int) -> None:
        """Prints what the shutdown waits for, which may take a while."""
        first = f"finishing {steps} step{'' if steps == 1 else 's'} in flight, then " if steps else ""
        self._print(f"Stopping: {first}saving the state. Ctrl-C again exits immediately without saving.")

    def finished(self) -> None:
        """Ends the live line."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def close(self) -> None:
        """Clears the phase, before the result is printed."""
        self._phase.clear()

    def _print(self, text: str) -> None:
        self._phase.clear()
        if self._line is not None:
            self._line.interrupt()
        self._invocation.status(text)
