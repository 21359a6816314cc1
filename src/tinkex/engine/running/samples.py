"""The unfinished samples: those that wait, by base model, and those in the decode batches of every lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tinkex.engine.operation import Operation
from tinkex.engine.scheduler import MayRun, SampleQueue


class Samples:
    """Where every unfinished sample is. Only used by the operation table, under its lock.

    >>> from tinkex.engine.operation import Kind
    >>> samples = Samples()
    >>> samples.put(Operation("req-1", "ada", "tiny", "sampler", 0, Kind.SAMPLE, 10))
    >>> samples.num_queued("lane-0")
    {'tiny': 1}
    >>> samples.take("lane-0", "tiny").request_id, samples.num_queued("lane-0")
    ('req-1', {'tiny': 0})
    """

    def __init__(self) -> None:
        self._queues: dict[str, SampleQueue] = {}
        self._running: dict[str, dict[str, dict[str, Operation]]] = {}
        """By lane and base model."""

    def put(self, operation: Operation) -> None:
        """Add a sample that waits."""
        self._queues.setdefault(operation.model, SampleQueue()).put(operation)

    def put_back(self, operation: Operation) -> None:
        """Have a sample of a lost lane wait, before all others."""
        del self._running[operation.lane][operation.model][operation.request_id]
        self._queues[operation.model].put_back(operation)

    def remove(self, operation: Operation) -> None:
        """Remove a sample that waits."""
        self._queues[operation.model].remove(operation)

    def end(self, operation: Operation) -> None:
        """Remove a sample from its batch, if it is in one."""
        self._running.get(operation.lane, {}).get(operation.model, {}).pop(operation.request_id, None)

    def take(self, lane: str, model: str, accepts: MayRun | None = None) -> Operation | None:
        """Move the next sample, of those that are accepted, into the batch of a lane."""
        return self._join(lane, self._queues[model].take(accepts))

    def take_assigned(
        self, lane: str, model: str, assign: Callable[[Operation], str | None]
    ) -> Operation | None:
        """Move the next sample that is assigned to a lane into its batch."""
        return self._join(lane, self._queues[model].take_assigned(lane, assign))

    def assign_again(self) -> None:
        """Forget which lanes the waiting samples are assigned to."""
        for queue in self._queues.values():
            queue.assign_again()

    def retried(self, model: str) -> Operation | None:
        """The interrupted sample that runs before all others, or None."""
        return self._queues[model].retried

    def num_waiting(self, model: str) -> int:
        """How many samples of a base model wait."""
        return len(self._queues[model])

    def waiting(self) -> Mapping[str, int]:
        """How many samples wait, for every base model that has some."""
        return {model: len(queue) for model, queue in self._queues.items() if len(queue)}

    def num_queued(self, lane: str) -> Mapping[str, int]:
        """How many samples wait, for every base model that has samples that wait, or run on a lane."""
        queued = {model: len(queue) for model, queue in self._queues.items()}
        running = self._running.get(lane, {})
        return {model: number for model, number in queued.items() if number or running.get(model)}

    def running(self, lane: str, model: str | None = None) -> Sequence[Operation]:
        """The samples in the batch of a model on a lane, or in all batches of the lane."""
        return [
            operation
            for source, members in self._running.get(lane, {}).items()
            if model in (source, None)
            for operation in members.values()
        ]

    def _join(self, lane: str, operation: Operation | None) -> Operation | None:
        if operation is not None:
            running = self._running.setdefault(lane, {}).setdefault(operation.model, {})
            running[operation.request_id] = operation
        return operation
