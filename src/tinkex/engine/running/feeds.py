"""Token feeds: the tokens of a running sample, read on an event loop while the engine decodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tinkex.engine.lanes.interface import TokenDelta
from tinkex.types import StopReason


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One token of one sequence; ``stop_reason`` is set on the last one."""

    sample: int
    index: int
    token: int
    logprob: float
    stop_reason: StopReason | None = None


@dataclass
class _StreamedSequence:
    """What one sequence has so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    length: int = 0
    """How many tokens a reader may read; set after the lists have grown."""
    stop_reason: StopReason | None = None


class TokenFeed:
    """What a running sample has produced since it was last read.

    The engine thread appends; a reader that is slow blocks nobody and finds more tokens when it reads again. A sample that
    is decoded again after a lost worker produces the same tokens, and a reader gets each of them once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._notified = False
        self._sequences: dict[int, _StreamedSequence] = {}
        self._num_read: dict[int, int] = {}

    def append(self, delta: TokenDelta) -> None:
        """Add the new tokens of a sequence; only called on the engine thread."""
        sequence = self._sequences.setdefault(delta.index, _StreamedSequence())
        sequence.tokens[delta.start :] = delta.tokens
        sequence.logprobs[delta.start :] = delta.logprobs
        sequence.stop_reason = delta.stop_reason
        sequence.length = len(sequence.tokens)
        self.notify()

    def restart(self) -> None:
        """Start again from empty sequences: the sample is decoded from its beginning."""
        self._sequences = {}

    def notify(self) -> None:
        """Wake the reader, from any thread."""
        if not self._notified:
            self._notified = True
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed
                self._loop.call_soon_threadsafe(self._changed.set)

    async def changed(self) -> None:
        """Wait until there may be something new."""
        await self._changed.wait()
        self._changed.clear()
        self._notified = False  # before anything is read: whatever arrives from now on wakes the reader again

    def read(self) -> Iterator[StreamedToken]:
        """The tokens that are new, those of one sequence in order."""
        for sample, each in list(self._sequences.items()):
            yield from self._rest(sample, each.tokens, each.logprobs, each.length, each.stop_reason)

    def read_rest(
        self, sample: int, tokens: Sequence[int], logprobs: Sequence[float], reason: StopReason
    ) -> Iterator[StreamedToken]:
        """The tokens of a finished sequence that were not read while it grew."""
        yield from self._rest(sample, tokens, logprobs, len(tokens), reason)

    def _rest(
        self,
        sample: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        end: int,
        reason: StopReason | None,
    ) -> Iterator[StreamedToken]:
        start = self._num_read.get(sample, 0)
        self._num_read[sample] = max(start, end)
        for index in range(start, end):
            last = reason if index == end - 1 else None
            yield StreamedToken(sample, index, tokens[index], logprobs[index], last)
