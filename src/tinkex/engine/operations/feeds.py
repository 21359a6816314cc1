"""Running samples watched from outside: what they have so far, read on an event loop while the engine thread goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinkex.types import StopReason


class Growing(Protocol):
    """A sequence that a sampler grows."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token of one sequence; ``stop_reason`` is set on the last one."""

    sample: int
    index: int
    token: int
    logprob: float
    stop_reason: StopReason | None = None


class Feed:
    """What a running sample has produced since somebody last looked.

    The engine thread only notes how far each sequence is; the tokens stay where they are. So a reader that is slow
    holds up nobody and takes no memory: it finds more tokens when it comes back.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._told = False
        self._reached: dict[int, tuple[Growing, int, StopReason | None]] = {}
        self._read: dict[int, int] = {}

    def grew(self, sequence: Growing) -> None:
        """Note how far a sequence is; for the engine thread."""
        self._reached[sequence.index] = (sequence, len(sequence.tokens), sequence.stop_reason)
        self.nudge()

    def nudge(self) -> None:
        """Wake the reader, from any thread."""
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._changed.set)

    async def changed(self) -> None:
        """Wait until there may be something new."""
        await self._changed.wait()
        self._changed.clear()
        self._told = False  # before anything is read: whatever comes from now on wakes the reader again

    def read(self) -> Iterator[Drawn]:
        """The tokens that are new, those of one sequence in order."""
        for sample, (sequence, count, reason) in list(self._reached.items()):
            yield from self._rest(sample, sequence.tokens, sequence.logprobs, count, reason)

    def read_rest(
        self, sample: int, tokens: Sequence[int], logprobs: Sequence[float], reason: StopReason
    ) -> Iterator[Drawn]:
        """The tokens of a finished sequence that were not read while it grew."""
        yield from self._rest(sample, tokens, logprobs, len(tokens), reason)

    def _rest(
        self,
        sample: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        end: int,
        reason: StopReason | None,
    ) -> Iterator[Drawn]:
        start = self._read.get(sample, 0)
        self._read[sample] = max(start, end)
        for index in range(start, end):
            yield Drawn(sample, index, tokens[index], logprobs[index], reason if index == end - 1 else None)
