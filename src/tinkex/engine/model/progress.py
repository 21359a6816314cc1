"""Progress of downloads, conversions and other long set-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Progress", "report", "report_size"]

Progress = Callable[[str, int, int | None], None]
"""``progress(phase, done_bytes, total_bytes)``; the total is None if unknown.

It can be called from another thread than the one that started the work, but never after the work has ended.
"""

_POLL_INTERVAL_S = 0.1


def report(progress: Progress | None, phase: str, done: int = 0, total: int | None = None) -> None:
    """Calls ``progress``, if there is one."""
    if progress is not None:
        progress(phase, done, total)


@contextmanager
def report_size(progress: Progress | None, phase: str, directory: Path, total: int | None) -> Iterator[None]:
    """Reports the size of ``directory`` while the body runs, for work that does not report its progress.

    Example:
        >>> with report_size(show, "downloading", Path("partial"), total=92_871_040):
        ...     subprocess.run(download, check=True)
    """
    if progress is None:
        yield
        return
    done = threading.Event()

    def poll() -> None:
        while not done.wait(_POLL_INTERVAL_S):
            size = _size(directory)
            report(progress, phase, size if total is None else min(size, total), total)

    report(progress, phase, 0, total)
    watcher = threading.Thread(target=poll, name="tinkex-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    report(progress, phase, _size(directory) if total is None else total, total)


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_size
        except FileNotFoundError:  # renamed or removed meanwhile
            continue
    return total
