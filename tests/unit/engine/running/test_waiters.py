from __future__ import annotations

import asyncio
import threading

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running.waiters import Waiters
from tinkex.engine.store import Outcome, ResultFormat

DONE = Outcome.done(b"x", ResultFormat.JSON)


def ended(*request_ids: str) -> list[Operation]:
    return [
        Operation(each, "ada", "base", "run", 1, Kind.OPTIM_STEP, 0, outcome=DONE) for each in request_ids
    ]


def test_everyone_who_waits_for_a_request_is_woken_from_another_thread() -> None:
    waiters = Waiters()

    async def wait() -> list[Outcome | None]:
        futures = [waiters.enter("r1"), waiters.enter("r1")]
        other = waiters.enter("r2")
        thread = threading.Thread(target=lambda: waiters.notify(ended("r1", "r3")))
        thread.start()
        outcomes = [await asyncio.wait_for(future, 10) for future in futures]
        thread.join()
        assert not other.done()
        waiters.leave("r2", other)
        return outcomes

    assert asyncio.run(wait()) == [DONE, DONE]


def test_those_whose_loop_is_gone_are_forgotten() -> None:
    waiters = Waiters()

    async def enter() -> None:
        waiters.enter("r1")

    asyncio.run(enter())
    waiters.notify(ended("r1"))


def test_there_are_no_waiters_after_the_end() -> None:
    waiters = Waiters()

    async def wait() -> list[Outcome | None]:
        before = waiters.enter("r1")
        waiters.end_all()
        return [await before, await waiters.enter("r1")]

    assert asyncio.run(wait()) == [None, None]
