"""Token feeds: the tokens of a running sample, read on an event loop while the engine decodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tinkex.engine.lanes.interface import TokenDelta
from tinkex.engine.loop_signal import LoopSignal
from tinkex.types import SampledSequence, StopReason

TopkRow: TypeAlias = "Sequence[tuple[int, float]] | None"


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One token of one sequence; ``stop_reason`` is set on the last one."""

    sample: int
    index: int
    token: int
    logprob: float
    stop_reason: StopReason | None = None
    topk: Sequence[tuple[int, float]] | None = None
    """The top-k tokens at its position with their logprobs, if the sample has them."""


@dataclass
class _StreamedSequence:
    """What one sequence has so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[TopkRow] = field(default_factory=list)
    """Those of each token, or nothing."""
    length: int = 0
    """How many tokens a reader may read; set after the lists have grown."""
    stop_reason: StopReason | None = None


class TokenFeed(LoopSignal):
    """What a running sample has produced since it was last read.

    The engine thread appends; a slow reader blocks no other and finds more tokens when it reads again. A sample that
    is decoded again after a lost worker produces the same tokens, and a reader gets each of them once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sequences: dict[int, _StreamedSequence] = {}
        self._num_read: dict[int, int] = {}

    def append(self, delta: TokenDelta) -> None:
        """Add the new tokens of a sequence; only called on the engine thread."""
        sequence = self._sequences.setdefault(delta.index, _StreamedSequence())
        sequence.tokens[delta.start :] = delta.tokens
        sequence.logprobs[delta.start :] = delta.logprobs
        if delta.topk is not None:
            sequence.topk[delta.start :] = delta.topk.rows()
        sequence.stop_reason = delta.stop_reason
        sequence.length = len(sequence.tokens)
        self.notify()

    def restart(self) -> None:
        """Start again from empty sequences: the sample is decoded from its beginning."""
        self._sequences = {}

    def read(self) -> Iterator[StreamedToken]:
        """The tokens that are new, those of one sequence in order."""
        for sample, each in list(self._sequences.items()):
            yield from self._rest(
                sample, each.tokens, each.logprobs, each.topk, each.length, each.stop_reason
            )

    def read_rest(self, sample: int, sequence: SampledSequence) -> Iterator[StreamedToken]:
        """The tokens of a finished sequence that were not read while it grew."""
        yield from self._rest(
            sample,
            sequence.tokens,
            sequence.logprobs or [],
            sequence.topk_logprobs or [],
            len(sequence.tokens),
            sequence.stop_reason,
        )

    def _rest(
        self,
        sample: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        topk: Sequence[TopkRow],
        end: int,
        reason: StopReason | None,
    ) -> Iterator[StreamedToken]:
        start = self._num_read.get(sample, 0)
        self._num_read[sample] = max(start, end)
        for index in range(start, end):
            last = reason if index == end - 1 else None
            yield StreamedToken(
                sample, index, tokens[index], logprobs[index], last, topk[index] if topk else None
            )


class TokenFeeds:
    """The feeds of all samples that have a reader. Only called on the engine thread.

    >>> feeds = TokenFeeds()
    >>> feeds.take_new(["req-1"])
    []
    """

    def __init__(self) -> None:
        self._feeds: dict[str, TokenFeed] = {}
        self._new: set[str] = set()

    def watch(self, request_id: str, feed: TokenFeed) -> None:
        """Append the tokens of a sample to a feed, from now on or from when it joins a batch."""
        self._feeds[request_id] = feed
        self._new.add(request_id)

    def unwatch(self, request_id: str) -> None:
        """Remove the feed of a sample."""
        self._feeds.pop(request_id, None)
        self._new.discard(request_id)

    def join(self, request_id: str) -> bool:
        """Whether a sample that joins a batch has a feed, so that its tokens are reported from the first one."""
        self._new.discard(request_id)
        return request_id in self._feeds

    def take_new(self, running: Collection[str]) -> Sequence[str]:
        """The running samples that got a feed after they had joined their batch; each is returned once."""
        found = [request_id for request_id in running if request_id in self._new]
        self._new.difference_update(found)
        return found

    def append(self, delta: TokenDelta) -> None:
        """Add new tokens to the feed of their sample, if it has one."""
        feed = self._feeds.get(delta.request_id)
        if feed is not None:
            feed.append(delta)

    def restart(self, request_ids: Collection[str]) -> None:
        """Start feeds again: their samples are decoded from the beginning."""
        for request_id in request_ids:
            self._new.discard(request_id)
            feed = self._feeds.get(request_id)
            if feed is not None:
                feed.restart()
