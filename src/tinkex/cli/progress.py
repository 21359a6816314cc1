"""Progress bars on stderr for transfers and item counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from tinkex.cli.invocation import Invocation

__all__ = ["count_bar", "hub_bars", "transfer_bar"]


@contextmanager
def transfer_bar(
    invocation: Invocation, label: str
) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Yields a callback ``(description, bytes done, total bytes)``, or None if no bar is shown."""
    if not invocation.shows_progress:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn())
    with _progress(*columns, TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(label, total=None)

        def update(description: str, done: int, total: int | None) -> None:
            bar.update(task, description=description, completed=done, total=total)

        yield update


@contextmanager
def hub_bars(invocation: Invocation) -> Iterator[None]:
    """Disables the progress bars of ``huggingface_hub`` unless this command shows progress."""
    try:
        from huggingface_hub import utils
    except ModuleNotFoundError:  # the code that needs it raises the error
        yield
        return
    library: Any = utils
    if invocation.shows_progress or library.are_progress_bars_disabled():
        yield
        return
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.enable_progress_bars()


@contextmanager
def count_bar(invocation: Invocation, label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a callback that advances the bar by one of ``total`` items."""
    if not invocation.shows_progress:
        yield lambda: None
        return
    with _progress() as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def _progress(*columns: str | ProgressColumn) -> Progress:
    """A bar that leaves stdout and stderr as they are: a loading line is written with escape sequences, which rich would print."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
