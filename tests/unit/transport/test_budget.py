"""Byte budgets: what fits goes, what does not waits its turn."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex._transport.budget import ByteBudget, Slots


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_work_waits_while_the_balance_is_negative_and_goes_in_order() -> None:
    budget = ByteBudget(10)
    await budget.acquire(8)
    await budget.acquire(8)  # overshoots once
    order: list[int] = []

    async def work(number: int) -> None:
        async with budget.reserve(1):
            order.append(number)

    tasks = [asyncio.ensure_future(work(number)) for number in range(3)]
    await settle()
    assert order == []
    budget.release(8)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_a_reservation_larger_than_the_budget_proceeds_alone() -> None:
    budget = ByteBudget(10)
    async with budget.reserve(1000):
        waiting = asyncio.ensure_future(budget.acquire(1))
        await settle()
        assert not waiting.done()
    await waiting


async def test_a_cancelled_waiter_does_not_block_the_next() -> None:
    budget = ByteBudget(0)
    await budget.acquire(1)
    first, second = (asyncio.ensure_future(budget.acquire(1)) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    budget.release(1)
    await second


async def test_a_waiter_cancelled_when_it_is_granted_releases_the_grant() -> None:
    budget = ByteBudget(0)
    await budget.acquire(1)
    first, second = (asyncio.ensure_future(budget.acquire(1)) for _ in range(2))
    await settle()
    budget.release(1)
    first.cancel()
    await second


async def test_slots_let_exactly_so_many_through() -> None:
    slots = Slots(3)
    inside = most = 0

    async def work() -> None:
        nonlocal inside, most
        async with slots:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(20)))
    assert (inside, most) == (0, 3)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 30), max_size=20), st.integers(0, 20))
def test_everything_gets_through_and_the_balance_returns(sizes: list[int], limit: int) -> None:
    async def main() -> None:
        budget = ByteBudget(limit)
        in_use: list[int] = []

        async def work(size: int) -> None:
            async with budget.reserve(size):
                in_use.append(size)
                assert sum(in_use) - size <= limit  # at most one piece overshoots
                await asyncio.sleep(0)
                in_use.remove(size)

        await asyncio.gather(*(work(size) for size in sizes))
        # As much as at the beginning: all of it and one overdraft, and then no more.
        await budget.acquire(limit)
        await budget.acquire(1)
        another = asyncio.ensure_future(budget.acquire(1))
        await asyncio.sleep(0)
        assert not another.done()
        another.cancel()

    asyncio.run(main())
