"""Operations during which the worker died: they run again, and one that ends it every time is given up.

A worker that is ended from outside says little about what it computed; one that ends by itself, or runs out of memory,
says much. The first time everything runs again as it was, so that the numbers come out the same. An operation that keeps being there
when it happens runs alone from then on, so that it is known which of those that ran together it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinkex.engine.backend.seam import WorkerDied
from tinkex.engine.operations.backlog import Operation, works_of
from tinkex.engine.scheduler import Pass, Plan
from tinkex.errors import EngineFailure

OWN_FAULT = 3
FROM_OUTSIDE = 1
ALONE_FROM = 6
TOO_MUCH = 9
"""Three deaths of the worker by itself, or nine from outside, all during one operation without a result in between."""


class Suspects:
    """How much speaks against each operation. Belongs to the engine thread.

    >>> suspects = Suspects()
    >>> for _ in range(3):
    ...     suspects.died(["req-1"], WorkerDied("it was ended by SIGSEGV", own_fault=True))
    >>> suspects.convicted("req-1"), suspects.convicted("req-2")
    (True, False)
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def died(self, request_ids: Iterable[str], death: WorkerDied) -> None:
        """Note which operations were under way when the worker died."""
        for request_id in request_ids:
            weight = OWN_FAULT if death.own_fault else FROM_OUTSIDE
            self._counts[request_id] = self._counts.get(request_id, 0) + weight

    def judge(self, plan: Plan[Operation], death: WorkerDied) -> Sequence[Plan[Operation]]:
        """What of a plan that was under way runs again, and in which company; nothing if it is to be given up."""
        works = works_of(plan)
        self.died([work.request_id for work in works], death)
        if len(works) == 1:
            return [] if self.convicted(works[0].request_id) else [plan]
        if any(self.alone(work.request_id) for work in works):
            return [Pass((work,)) for work in works]
        return [plan]

    def judge_replay(self, run_ids: Iterable[str], death: WorkerDied) -> Sequence[str]:
        """Which runs are not to be replayed again, because that ends the worker. What is killed from outside is not to blame.

        What they did once worked, and would be lost for good: nobody loses a run because somebody ended processes.
        """
        if not death.own_fault:
            return []
        self.died(run_ids, death)
        return [run_id for run_id in run_ids if self.convicted(run_id)]

    def cleared(self, request_ids: Iterable[str]) -> None:
        """Forget operations that have an outcome, and runs that are back."""
        for request_id in request_ids:
            self._counts.pop(request_id, None)

    def alone(self, request_id: str) -> bool:
        """Whether an operation has to run alone."""
        return self._counts.get(request_id, 0) >= ALONE_FROM

    def convicted(self, request_id: str) -> bool:
        """Whether an operation that ran alone is not to run again."""
        return self._counts.get(request_id, 0) >= TOO_MUCH


def given_up(death: WorkerDied) -> EngineFailure:
    """What an operation fails with that ended the worker every time."""
    return EngineFailure(
        f"the worker died every time this operation ran, the last time because {death.reason}; it was given up, and changed "
        "nothing. If memory ran out, send less at once, or run the engine with more memory."
    )
