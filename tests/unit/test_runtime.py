"""The background loop: one thread, any number of callers, forks and exits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future

import pytest

from tinkex._runtime import await_future, background


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def test_a_plain_caller_gets_the_value() -> None:
    assert background().run(double(21)) == 42


def test_errors_reach_the_caller() -> None:
    async def fail() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        background().run(fail())


def test_many_threads_share_one_loop() -> None:
    loops: set[int] = set()

    def work() -> None:
        loops.add(id(background().loop))
        assert background().run(double(1)) == 2

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loops) == 1


def test_any_number_of_event_loops_may_wait_one_after_the_other() -> None:
    async def main(value: int) -> int:
        return await await_future(background().submit(double(value)))

    assert [asyncio.run(main(value)) for value in range(5)] == [0, 2, 4, 6, 8]


def test_a_loop_that_was_closed_before_the_answer_does_no_harm() -> None:
    release = threading.Event()

    async def slow() -> int:
        while not release.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.005)
        return 1

    future = background().submit(slow())

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await await_future(future)

    asyncio.run(impatient())
    release.set()
    assert future.result(60) == 1


def test_cancelling_the_waiter_cancels_the_work_only_if_configured() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async def wait_and_cancel(future: Future[None], *, propagate_cancel: bool) -> None:
        waiting = asyncio.ensure_future(await_future(future, propagate_cancel=propagate_cancel))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    kept = background().submit(forever())
    asyncio.run(wait_and_cancel(kept, propagate_cancel=False))
    assert not kept.done()
    kept.cancel()
    dropped = background().submit(forever())
    asyncio.run(wait_and_cancel(dropped, propagate_cancel=True))
    assert dropped.cancelled()


def test_a_cancelled_future_reads_as_cancelled_on_every_loop() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    future = background().submit(forever())
    future.cancel()

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await await_future(future)

    asyncio.run(main())


def test_a_blocking_call_on_the_loop_itself_is_rejected() -> None:
    async def nested() -> int:
        return background().run(double(1))

    with pytest.raises(RuntimeError, match="own event loop"):
        background().run(nested())


def test_the_caller_s_context_reaches_the_work() -> None:
    from contextvars import ContextVar

    trace: ContextVar[str] = ContextVar("trace", default="none")

    async def read() -> str:
        return trace.get()

    token = trace.set("abc")
    try:
        assert background().run(read()) == "abc"
    finally:
        trace.reset(token)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_gets_its_own_loop_and_the_parent_keeps_its() -> None:
    program = """
    import asyncio, os, sys
    from tinkex._runtime import background

    async def answer():
        await asyncio.sleep(0.01)
        return 7

    assert background().run(answer()) == 7
    child = os.fork()
    if child == 0:
        ok = background().run(answer()) == 7
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert background().run(answer()) == 7
    print("both")
    """
    assert run(program) == "both\n"


@pytest.mark.slow
def test_work_completes_although_its_future_is_dropped() -> None:
    program = """
    import asyncio, gc, threading
    from tinkex._runtime import background

    begun, done, events = threading.Event(), threading.Event(), []

    async def work():
        wake = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, events.append, None)  # keeps the loop awake, not the work
        begun.set()
        try:
            await asyncio.wait_for(wake.wait(), None)
        finally:
            done.set()

    background().submit(work())
    begun.wait()
    for _ in range(5):
        gc.collect()
        background().run(asyncio.sleep(0))
    print("collected" if done.is_set() else "alive")
    """
    assert run(program) == "alive\n"


@pytest.mark.slow
def test_exiting_with_work_in_flight_is_quick_and_silent() -> None:
    program = """
    import asyncio
    from tinkex._runtime import background, on_exit

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)

    background().submit(forever())
    background().start(forever())
    on_exit(lambda: print("after the loop"))
    print("done")
    """
    assert run(program) == "done\nafter the loop\n"


def test_leaving_ends_also_what_is_begun_by_what_ends() -> None:
    program = """
    import asyncio
    from tinkex._runtime import background, create_detached_task

    begun = []

    async def tell_others():
        await asyncio.Event().wait()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            begun.append(create_detached_task(tell_others()))

    background().submit(work())
    background().run(asyncio.sleep(0))
    print("done")
    """
    assert run(program) == "done\n"


def run(program: str) -> str:
    """Runs a program in a fresh interpreter with every warning shown; anything on stderr is a failure."""
    out = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "always", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    assert not out.stderr, out.stderr
    return out.stdout


def test_a_call_that_ends_with_sys_exit_ends_for_its_caller_and_the_loop_continues() -> None:
    async def leave() -> None:
        sys.exit(3)

    async def answer() -> int:
        await asyncio.sleep(0.01)
        return 42

    waiting = background().submit(answer())
    with pytest.raises(SystemExit):
        background().run(leave())
    assert waiting.result(30) == 42
    assert background().run(answer()) == 42
