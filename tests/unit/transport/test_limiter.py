"""The gate in front of sampling."""

from __future__ import annotations

import asyncio
import time

import pytest

from tinkex._transport.limiter import (
    LARGE_PROMPT_BYTES,
    LONG_PAUSE_S,
    MAX_SUBMISSIONS,
    MAX_SUBMISSIONS_UNDER_BACKPRESSURE,
    SHORT_PAUSE_S,
    Limiter,
)


async def most_at_once(limiter: Limiter, count: int, num_bytes: int = 0) -> int:
    """How many of ``count`` submissions the limiter lets run side by side."""
    inside = most = 0

    async def submit() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.001)
        inside -= 1

    await asyncio.gather(*(limiter.admit(num_bytes, submit) for _ in range(count)))
    return most


async def test_submissions_side_by_side_are_bounded() -> None:
    assert await most_at_once(Limiter(10**9), MAX_SUBMISSIONS + 50) == MAX_SUBMISSIONS


async def test_bytes_side_by_side_are_bounded() -> None:
    assert await most_at_once(Limiter(100), 20, num_bytes=30) == 4  # 90 fit, and one more may overshoot


@pytest.mark.slow
async def test_a_429_pauses_all_submissions_and_then_admits_a_few() -> None:
    limiter = Limiter(10**9)
    pause = limiter.report_backpressure(100)
    assert pause == SHORT_PAUSE_S
    submissions = asyncio.ensure_future(most_at_once(limiter, 40))
    await asyncio.sleep(pause / 20)
    assert not submissions.done()
    assert await submissions <= MAX_SUBMISSIONS_UNDER_BACKPRESSURE


@pytest.mark.slow
async def test_who_waits_in_line_when_the_server_pushes_back_does_not_go_out_before_the_pause_is_over() -> (
    None
):
    limiter = Limiter(10)
    order: list[str] = []
    first_may_end = asyncio.Event()

    async def first() -> None:
        order.append("first")
        await first_may_end.wait()

    async def second() -> None:
        order.append("second")

    holding = asyncio.ensure_future(limiter.admit(50, first))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(limiter.admit(50, second))  # no room for its bytes yet
    await asyncio.sleep(0)
    until = time.monotonic() + limiter.report_backpressure(1)
    first_may_end.set()
    await holding
    assert order == ["first"]
    await waiting
    assert order == ["first", "second"]
    assert time.monotonic() >= until


@pytest.mark.slow
async def test_a_success_ends_no_pause() -> None:
    limiter = Limiter(10**9)
    may_answer = asyncio.Event()
    under_way = asyncio.ensure_future(limiter.admit(1, may_answer.wait))
    await asyncio.sleep(0)
    until = time.monotonic() + limiter.report_backpressure(1)  # another one was rejected
    may_answer.set()
    await under_way
    await limiter.admit(1, lambda: asyncio.sleep(0))
    assert time.monotonic() >= until


def test_large_prompts_and_the_server_s_wish_make_the_pause_longer() -> None:
    assert Limiter(1).report_backpressure(LARGE_PROMPT_BYTES + 1) == LONG_PAUSE_S
    assert Limiter(1).report_backpressure(1, retry_after_s=7.0) == 7.0
    assert Limiter(1).report_backpressure(1, retry_after_s=0.1) == SHORT_PAUSE_S
