"""Shows a run in a notebook: a progress bar and curves that grow with every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from tinkex.errors import SetupError
from tinkex.train.html_report import plot_metric
from tinkex.train.loop import TrainingCallback

__all__ = ["NotebookDisplay"]

_STYLE = """<style>
.tinkex-run { --line: #2563eb; --eval: #d97706; --grid: #9ca3af; max-width: 44rem; font-family: sans-serif; }
.tinkex-run progress { width: 60%; } .tinkex-run svg { width: 100%; height: auto; }
.tinkex-run svg text { font-size: 12px; fill: currentColor; } .tinkex-run .axis { stroke: var(--grid); }
.tinkex-run .train { fill: none; stroke: var(--line); stroke-width: 1.5; }
.tinkex-run .eval { fill: none; stroke: var(--eval); stroke-width: 1.5; } .tinkex-run circle.eval { fill: var(--eval); }
.tinkex-run .key-train { color: var(--line); } .tinkex-run .key-eval { color: var(--eval); }
</style>"""


class NotebookDisplay(TrainingCallback):
    """Shows the phase, a progress bar and a live curve of the loss or reward below the cell.

    ``show`` receives the HTML of each update; by default
    it replaces the output of the cell.

    Example:
        >>> train.run(service, settings, train.NotebookDisplay())
    """

    def __init__(self, show: Callable[[str], Any] | None = None) -> None:
        self._show = _cell_output() if show is None else show
        self._phase = "starting"
        self._step = self._total_steps = 0
        self._headline = "loss"
        self._trained: list[tuple[float, float]] = []
        self._evaluated: list[tuple[float, float]] = []
        self._notes: list[str] = []

    def data_read(self, description: str) -> None:
        """Shows what was read."""
        self._note(description)

    def created(self, directory: Path) -> None:
        """Shows the directory of the run."""
        self._note(f"run in {directory}")

    def working(self, phase: str, done: int, total: int) -> None:
        """Shows the phase."""
        self._phase = f"{phase} {done}/{total}" if total > 1 else phase
        self._update()

    def started(self, total_steps: int, first_step: int, headline: str) -> None:
        """Shows the bar."""
        self._total_steps, self._step, self._headline = total_steps, first_step, headline
        self._update()

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advances the bar and the curve."""
        self._step, self._phase = step, f"{self._headline} {metrics[self._headline]:.3f}"
        self._trained.append((float(step), metrics[self._headline]))
        self._update()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the evaluation to the curve."""
        if self._headline in metrics:
            self._evaluated.append((float(step), metrics[self._headline]))
        self._update()

    def saved(self, step: int, path: str) -> None:
        """Shows the path of the checkpoint."""
        self._note(f"checkpoint after step {step}: {path}")

    def stopping(self, steps: int) -> None:
        """Shows what the interruption waits for."""
        self._phase = f"stopping: {steps} steps in flight, then the state is saved"
        self._update()

    def finished(self) -> None:
        """Leaves the bar and the curve as they are."""
        self._phase = "finished" if self._step >= self._total_steps else "stopped"
        self._update()

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._update()

    def _update(self) -> None:
        parts = [_STYLE, '<div class="tinkex-run">']
        if self._total_steps:
            bar = f'<progress value="{self._step}" max="{self._total_steps}"></progress>'
            parts.append(f"<p>{bar} step {self._step} of {self._total_steps}, {escape(self._phase)}</p>")
        else:
            parts.append(f"<p>{escape(self._phase)}</p>")
        if len(self._trained) > 1:
            parts.append(plot_metric(self._headline, self._trained, self._evaluated))
        parts += [f"<p>{escape(note)}</p>" for note in self._notes]
        self._show("\n".join([*parts, "</div>"]))


def _cell_output() -> Callable[[str], Any]:
    """Returns a function that replaces the output of the cell; the first call creates it."""
    try:
        from IPython.display import HTML, DisplayHandle  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise SetupError(
            "a display for notebooks needs IPython, which is not installed; run: pip install jupyterlab"
        ) from error
    handle = DisplayHandle()
    shown: list[bool] = []

    def show(content: str) -> None:
        (handle.update if shown else handle.display)(HTML(content))
        shown.append(True)

    return show
