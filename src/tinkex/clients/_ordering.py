"""The turnstile: operations of one run get their numbers when they are called, and go out in that order."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeAlias

__all__ = ["Send", "Turn", "Turnstile"]

Send: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""Submits the operations of a turn, in its turn."""


class Turn:
    """The right to submit the operations numbered ``seq_ids``, once all earlier ones have been submitted.

    Used as ``async with turn:`` on the background loop. However the block ends, the next turn comes.
    """

    def __init__(self, seq_ids: range, after: Turn | None) -> None:
        self.seq_ids = seq_ids
        self.after = after
        self.passed = asyncio.Event()
        self.heir: Turn | None = None
        """The turn after it, where that was given up."""
        self.send: Send | None = None
        """What submits it; None as soon as it has begun."""
        self.context = contextvars.copy_context()
        """That of the call, whoever sends it."""

    async def __aenter__(self) -> Self:
        if self.after is not None:
            try:
                await self.after.passed.wait()
            except asyncio.CancelledError:
                # Given up while waiting, it still comes after the earlier ones, and only then lets others by.
                self.after.heir = self
                if self.after.passed.is_set():
                    self._pass()
                raise
            self.after = None  # turns that are over must not keep all earlier ones in memory
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pass()

    def _pass(self) -> None:
        turn: Turn | None = self
        while turn is not None:
            turn.passed.set()
            turn = turn.heir


class Turnstile:
    """Hands out turns; several threads may ask at once.

    >>> turnstile = Turnstile()
    >>> async def send() -> None: ...
    >>> turnstile.take(2, lambda turn: send)
    >>> [turn.seq_ids for turn in turnstile.due()]
    [range(1, 3)]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Turn | None = None

    def take(self, count: int, prepare: Callable[[Turn], Send]) -> None:
        """Puts a turn for the next ``count`` numbers in line; the first number of a run is 1.

        ``prepare`` makes the requests ready. If it fails, no number is used up: servers wait for a number
        that never comes.
        """
        with self._lock:
            last = self._last
            first = 1 if last is None else last.seq_ids.stop
            turn = Turn(range(first, first + count), last)
            turn.send = prepare(turn)
            # The one step that takes the numbers and puts them in line: Ctrl-C finds both done, or neither.
            self._last = turn

    def due(self) -> list[Turn]:
        """The turns in line that nobody has begun, in their order; asked on the background loop."""
        turns = []
        turn = self._last
        while turn is not None and turn.send is not None:
            turns.append(turn)
            turn = turn.after
        return turns[::-1]
