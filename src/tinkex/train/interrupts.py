"""Handling of Ctrl-C that defers it in critical sections."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["CriticalSection", "Interrupts"]


class Interrupts:
    """While it is open, Ctrl-C raises ``KeyboardInterrupt`` immediately, or at the end of a critical section.

    A program's own handler stays in place. Outside the main thread, which receives no signals, this does nothing.

    >>> with Interrupts() as interrupts:
    ...     with interrupts.critical:
    ...         pass  # runs completely or not at all
    """

    def __init__(self) -> None:
        self.critical = CriticalSection()
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
        if not self.critical.is_open or self.critical.is_pending:
            signal.default_int_handler(number, frame)
        self.critical.is_pending = True


class CriticalSection:
    """A block that defers Ctrl-C to its end. A second Ctrl-C is not deferred.

    >>> section = CriticalSection()
    >>> with section:
    ...     section.is_open
    True
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_pending = False

    def __enter__(self) -> Self:
        self.is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_open = False
        if self.is_pending and error is None:
            self.is_pending = False
            raise KeyboardInterrupt
