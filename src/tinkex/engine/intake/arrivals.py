"""Group intake: requests that arrive at the same time are accepted in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from tinkex.engine.intake.admission import Admission, Arrival
from tinkex.types import SampleRequest, UntypedAPIFuture

MAX_GROUP = 32
"""How many requests are accepted before the event loop does something else."""

_Waiting: TypeAlias = list[tuple[Arrival, "asyncio.Future[UntypedAPIFuture]"]]


class Arrivals:
    """Collects the requests of one iteration of an event loop, and submits them together."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._waiting: dict[asyncio.AbstractEventLoop, _Waiting] = {}

    async def submit(self, arrival: Arrival) -> UntypedAPIFuture:
        """Accept a request, or raise the error that says why not."""
        loop = asyncio.get_running_loop()
        if loop not in self._waiting:
            self._waiting[loop] = []
            loop.call_soon(self._admit, loop)
        answer: asyncio.Future[UntypedAPIFuture] = loop.create_future()
        self._waiting[loop].append((arrival, answer))
        return await answer

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        for group in _groups(self._waiting.pop(loop)):
            results: Sequence[UntypedAPIFuture | Exception]
            try:
                results = self._admission.submit_all([arrival for arrival, _ in group])
            except Exception as error:  # noqa: BLE001 -- raised where the answers are awaited
                results = [error] * len(group)
            for (_, answer), result in zip(group, results, strict=True):
                if answer.done():
                    continue  # its client has disconnected
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)


def _groups(waiting: _Waiting) -> Iterator[_Waiting]:
    """Cuts requests into groups with at most one of each run, in order."""
    group: _Waiting = []
    runs: set[str] = set()
    for item in waiting:
        request = item[0].request
        run_id = None if isinstance(request, SampleRequest) else getattr(request, "model_id", None)
        is_alone = run_id is None and not isinstance(request, SampleRequest)
        if group and (is_alone or run_id in runs or len(group) == MAX_GROUP):
            yield group
            group, runs = [], set()
        group.append(item)
        if is_alone:
            yield group
            group = []
        elif run_id is not None:
            runs.add(run_id)
    if group:
        yield group
