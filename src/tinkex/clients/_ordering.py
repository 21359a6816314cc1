"""The turnstile: operations of one run get their numbers when they are called, and go out in that order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

__all__ = ["Turn", "Turnstile"]


class Turn:
    """The right to submit the operations numbered ``seq_ids``, once all earlier ones have been submitted.

    Used as ``async with turn:`` on the background loop. However the block ends, the next turn comes.
    """

    def __init__(self, seq_ids: range, after: Turn | None) -> None:
        self.seq_ids = seq_ids
        self._after = after
        self.passed = asyncio.Event()

    async def __aenter__(self) -> Self:
        if self._after is not None:
            try:
                await self._after.passed.wait()
            except asyncio.CancelledError:
                self._pass_when_due(self._after)
                raise
            self._after = None  # turns that are over must not keep all earlier ones in memory
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.passed.set()

    def _pass_when_due(self, after: Turn) -> None:
        """A turn given up while waiting still comes after the earlier ones, and only then lets others by."""

        async def wait() -> None:
            await after.passed.wait()
            self.passed.set()

        self._waiting = asyncio.ensure_future(wait())


class Turnstile:
    """Hands out turns; several threads may ask at once.

    >>> turnstile = Turnstile()
    >>> with turnstile.reserve() as turn:
    ...     turn.seq_ids
    range(1, 2)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_seq_id = 1
        self._last: Turn | None = None

    @contextmanager
    def reserve(self, count: int = 1) -> Iterator[Turn]:
        """The next ``count`` numbers and the turn to submit them; the first number of a run is 1.

        The block makes the requests ready. If it fails, the numbers are not used up: servers wait for a
        number that never comes.
        """
        with self._lock:
            first = self._next_seq_id
            turn = Turn(range(first, first + count), self._last)
            yield turn
            self._next_seq_id += count
            self._last = turn
