"""Which sampler each sample joins: the one that has the beginning of its prompt in memory, else the least loaded."""

from __future__ import annotations

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
        self._available = list(lanes)
        self._occupied: Collection[str] = ()
        self._load = dict.fromkeys(lanes, 0)
        self._assigned: dict[str, tuple[str, int]] = {}
        self._prefixes: dict[str, OrderedDict[_Prefix, None]] = {lane: OrderedDict() for lane in lanes}

    @property
    def has_choice(self) -> bool:
        """Whether there are several samplers, or may be."""
        return self._can_grow or len(self._load) > 1

    def add(self, lane: str) -> None:
        """Add a sampler; it gets samples as soon as it is available."""
        self._load[lane] = 0
        self._prefixes[lane] = OrderedDict()

    def remove(self, lane: str) -> None:
        """Remove a sampler; what waits for it is assigned again."""
        del self._load[lane], self._prefixes[lane]
        self._available = [each for each in self._available if each != lane]
        self._assigned = {name: found for name, found in self._assigned.items() if found[0] != lane}

    def set_available(self, lanes: Collection[str], occupied: Collection[str] = ()) -> None:
        """Set which samplers run, and which of them do something else; what waits for others may be assigned again."""
        self._available = [lane for lane in self._load if lane in lanes]
        self._occupied = occupied

    def assign(self, operation: Operation) -> str | None:
        """The sampler that a sample should join; None if none runs."""
        lane, _ = self._assigned.get(operation.request_id, (None, 0))
        if lane is not None and lane in self._available:
            return lane
        if not self._available:
            return None
        prefix = _prefix(operation)
        least = min(self._available, key=self._load.__getitem__)
        limit = MAX_IMBALANCE * self._load[least] + 1
        having = [
            lane for lane in self._available if prefix in self._prefixes[lane] and self._load[lane] <= limit
        ]
        chosen = min(having, key=self._load.__getitem__) if having else least
        self.move(operation, chosen)
        return chosen

    def may_take(self, operation: Operation, max_load: int) -> bool:
        """Whether an idle sampler may take a sample that is assigned to another: that one is occupied or full."""
        lane = self.assign(operation)
        return lane is None or lane in self._occupied or self._load[lane] > max_load

    def move(self, operation: Operation, lane: str) -> None:
        """Assign a sample to a sampler, whatever it was assigned to before."""
        self.end([operation])
        request = operation.request
        num_sequences = request.num_samples if isinstance(request, SampleRequest) else 1
        self._assigned[operation.request_id] = lane, num_sequences
        self._load[lane] += num_sequences
        prefix = _prefix(operation)
        if prefix is not None:
            known = self._prefixes[lane]
            known[prefix] = None
            known.move_to_end(prefix)
            if len(known) > MAX_PREFIXES:
                known.popitem(last=False)

    def end(self, operations: Collection[Operation]) -> None:
        """Forget samples that have ended, or have to be assigned again."""
        for operation in operations:
            lane, num_sequences = self._assigned.pop(operation.request_id, (None, 0))
            if lane is not None:
                self._load[lane] -= num_sequences

    def forget(self, lane: str) -> None:
        """Forget the prefixes of a lane that has lost its memory; one that only trains has none."""
        self._prefixes.get(lane, OrderedDict()).clear()


def _prefix(operation: Operation) -> _Prefix | None:
    """The beginning of a sample's prompt, on its weights; None if its request is not in memory."""
    request = operation.request
    first = request.prompt.chunks[0] if isinstance(request, SampleRequest) and request.prompt.chunks else None
    if not isinstance(first, EncodedTextChunk):
        return None
    return operation.run_id, tuple(first.tokens[:PREFIX_TOKENS])
