"""Which sampler each sample joins: the one that has the beginning of its prompt in memory, else the least loaded."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TypeAlias

from tinkex.engine.operation import Operation
from tinkex.types import EncodedTextChunk, SampleRequest

PREFIX_TOKENS = 32
"""Prompts that begin with the same tokens go to the same sampler, whose prefix cache has them."""
MAX_PREFIXES = 4096
"""Prefixes remembered for each sampler."""
MAX_IMBALANCE = 2.0
"""A sampler with more than so many times the sequences of the least loaded one, and one, gets no sample for its prefix alone."""

_Prefix: TypeAlias = tuple[str, tuple[int, ...]]


class SampleRouter:
    """Assigns samples to samplers when they are first considered. It is pure: no clocks, no I/O.

    >>> from tinkex.engine.operation import Kind
    >>> router = SampleRouter(["sampler-0", "sampler-1"])
    >>> samples = [Operation(f"req-{n}", "ada", "base", "s", n, Kind.SAMPLE, 10) for n in range(3)]
    >>> [router.assign(sample) for sample in samples]
    ['sampler-0', 'sampler-1', 'sampler-0']
    """

    def __init__(self, lanes: Sequence[str], *, can_grow: bool = False) -> None:
        self._can_grow = can_grow
        self._next_number = itertools.count(len(lanes))
        self._numbers = {lane: number for number, lane in enumerate(lanes)}
        self._available = frozenset(lanes)
        self._was_removed = False
        """Whether an available sampler was removed since :meth:`set_available`."""
        self._occupied: Collection[str] = ()
        self._load = dict.fromkeys(lanes, 0)
        self._assigned: dict[str, tuple[str, int]] = {}
        self._prefixes: dict[str, OrderedDict[_Prefix, None]] = {lane: OrderedDict() for lane in lanes}
        self._having: dict[_Prefix, set[str]] = {}
        """The samplers that have a prefix."""
        self._order: list[tuple[int, int, str]] = []
        """Available samplers by load; entries with another load than that of their sampler are obsolete."""
        self._enter(lanes)

    @property
    def has_choice(self) -> bool:
        """Whether there are several samplers, or may be."""
        return self._can_grow or len(self._load) > 1

    def add(self, lane: str) -> None:
        """Add a sampler; it gets samples as soon as it is available."""
        self._numbers[lane] = next(self._next_number)
        self._load[lane] = 0
        self._prefixes[lane] = OrderedDict()

    def remove(self, lane: str) -> None:
        """Remove a sampler; what waits for it is assigned again."""
        self.forget(lane)
        del self._load[lane], self._prefixes[lane], self._numbers[lane]
        self._assigned = {name: found for name, found in self._assigned.items() if found[0] != lane}
        if lane in self._available:
            self._available -= {lane}
            self._was_removed = True
        self._order = []
        self._enter(self._available)

    def set_available(self, lanes: Collection[str], occupied: Collection[str] = ()) -> bool:
        """Set which samplers run, and which of them do something else; returns whether waiting samples have to be assigned again."""
        self._occupied = frozenset(occupied)
        available = frozenset(self._load.keys() & lanes)
        if available == self._available and not self._was_removed:
            return False
        self._available, self._order, self._was_removed = available, [], False
        self._enter(available)
        return True

    def assign(self, operation: Operation) -> str | None:
        """The sampler that a sample should join; None if none runs."""
        lane, _ = self._assigned.get(operation.request_id, (None, 0))
        if lane is not None and lane in self._available:
            return lane
        if not self._available:
            return None
        least = self._least_loaded()
        limit = MAX_IMBALANCE * self._load[least] + 1
        prefix = _prefix(operation)
        having = self._having.get(prefix, ()) if prefix is not None else ()
        usable = [lane for lane in having if lane in self._available and self._load[lane] <= limit]
        chosen = min(usable, key=self._rank) if usable else least
        self.move(operation, chosen)
        return chosen

    def _rank(self, lane: str) -> tuple[int, int]:
        return self._load[lane], self._numbers[lane]

    def _least_loaded(self) -> str:
        """The available sampler with the fewest sequences; ties go to the first."""
        while self._order[0][0] != self._load[self._order[0][2]]:
            heapq.heappop(self._order)
        return self._order[0][2]

    def _enter(self, lanes: Collection[str]) -> None:
        """Put available samplers in order after their load has changed."""
        if len(self._order) > 8 * len(self._load):
            self._order, lanes = [], self._available
        for lane in lanes:
            if lane in self._available:
                heapq.heappush(self._order, (*self._rank(lane), lane))

    def may_take(self, operation: Operation, max_load: int) -> bool:
        """Whether an idle sampler may take a sample that is assigned to another: that one is occupied or full."""
        lane = self.assign(operation)
        return lane is None or lane in self._occupied or self._load[lane] > max_load

    def may_take_any(self, max_load: int) -> bool:
        """Whether there is a sampler whose samples another may take."""
        return bool(self._occupied) or any(load > max_load for load in self._load.values())

    def move(self, operation: Operation, lane: str) -> None:
        """Assign a sample to a sampler, whatever it was assigned to before."""
        self.end([operation])
        request = operation.request
        num_sequences = request.num_samples if isinstance(request, SampleRequest) else 1
        self._assigned[operation.request_id] = lane, num_sequences
        self._load[lane] += num_sequences
        self._enter([lane])
        prefix = _prefix(operation)
        if prefix is not None:
            known = self._prefixes[lane]
            known[prefix] = None
            known.move_to_end(prefix)
            self._having.setdefault(prefix, set()).add(lane)
            if len(known) > MAX_PREFIXES:
                oldest, _ = known.popitem(last=False)
                self._drop(oldest, lane)

    def end(self, operations: Collection[Operation]) -> None:
        """Forget samples that have ended, or have to be assigned again."""
        for operation in operations:
            lane, num_sequences = self._assigned.pop(operation.request_id, (None, 0))
            if lane is not None:
                self._load[lane] -= num_sequences
                self._enter([lane])

    def forget(self, lane: str) -> None:
        """Forget the prefixes of a lane that has lost its memory; one that only trains has none."""
        known = self._prefixes.get(lane, OrderedDict())
        for prefix in known:
            self._drop(prefix, lane)
        known.clear()

    def _drop(self, prefix: _Prefix, lane: str) -> None:
        lanes = self._having[prefix]
        lanes.discard(lane)
        if not lanes:
            del self._having[prefix]


def _prefix(operation: Operation) -> _Prefix | None:
    """The beginning of a sample's prompt, on its weights; None if its request is not in memory."""
    request = operation.request
    first = request.prompt.chunks[0] if isinstance(request, SampleRequest) and request.prompt.chunks else None
    if not isinstance(first, EncodedTextChunk):
        return None
    return operation.run_id, tuple(first.tokens[:PREFIX_TOKENS])
