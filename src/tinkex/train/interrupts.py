"""Ctrl-C, taken only where nothing is half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Held", "Interrupts"]


class Interrupts:
    """While it is open, Ctrl-C raises ``KeyboardInterrupt`` at once, but for blocks that hold it back to their end.

    A program's own handler is its own business, and stays; so does everything outside the main thread, where no
    interrupt comes.

    >>> with Interrupts() as interrupts:
    ...     with interrupts.held:
    ...         pass  # what must be done wholly or not at all
    """

    def __init__(self) -> None:
        self.held = Held()
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if before is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._on_interrupt)
                self._before = before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.held.is_open or self.held.is_due:
            signal.default_int_handler(number, frame)
        self.held.is_due = True


class Held:
    """A block in which Ctrl-C waits; it is raised when the block ends. The second one does not wait.

    >>> held = Held()
    >>> with held:
    ...     held.is_open
    True
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_due = False

    def __enter__(self) -> Self:
        self.is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_open = False
        if self.is_due and error is None:
            self.is_due = False
            raise KeyboardInterrupt
