"""Bars on stderr for transfers and for many small things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.cli.invocation import Invocation

__all__ = ["count_bar", "hub_bars", "transfer_bar"]


@contextmanager
def transfer_bar(
    invocation: Invocation, label: str
) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Something to tell ``(what, bytes done, bytes in all)``; None where nobody looks."""
    if not invocation.shows_progress:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(label, total=None)

        def show(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


@contextmanager
def hub_bars(invocation: Invocation) -> Iterator[None]:
    """Lets the hub's library draw its own bars where ours would be drawn, and nowhere else."""
    try:
        from huggingface_hub import utils
    except ModuleNotFoundError:  # whoever needs it says so
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
    """Something to call whenever one of ``total`` things is done."""
    if not invocation.shows_progress:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
