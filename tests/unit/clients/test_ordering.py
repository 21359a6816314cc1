"""The sequencer: numbers at the call, turns in order, and nothing that wedges it."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.clients._ordering import Send, Sequencer, Submission


async def send() -> None:
    """What a turn sends is its own affair."""


def take(sequencer: Sequencer, count: int = 1) -> Submission:
    taken: list[Submission] = []

    def prepare(turn: Submission) -> Send:
        taken.append(turn)
        return send

    sequencer.add(count, prepare)
    return taken[0]


def test_numbers_start_at_one_and_have_no_gaps() -> None:
    sequencer = Sequencer()
    taken = [number for count in (1, 3, 0, 2) for number in take(sequencer, count).seq_ids]
    assert taken == [1, 2, 3, 4, 5, 6]


async def test_numbers_of_a_call_that_failed_are_given_again() -> None:
    sequencer = Sequencer()
    first = take(sequencer)

    def fails(turn: Submission) -> Send:
        raise LookupError(turn.seq_ids)

    with pytest.raises(LookupError):
        sequencer.add(3, fails)
    second = take(sequencer)
    assert second.seq_ids == range(2, 3)
    async with asyncio.timeout(60), first:
        pass
    async with asyncio.timeout(60), second:
        pass


def test_unsent_submissions_are_returned_in_order() -> None:
    sequencer = Sequencer()
    turns = [take(sequencer) for _ in range(3)]
    assert sequencer.unsent() == turns
    turns[0].send = None
    assert sequencer.unsent() == turns[1:]
    for turn in turns:
        turn.send = None
    assert sequencer.unsent() == []


def test_threads_never_get_the_same_number() -> None:
    sequencer = Sequencer()
    taken: list[int] = []

    def work() -> None:
        for _ in range(200):
            taken.extend(take(sequencer, 2).seq_ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 1601))


async def test_a_turn_waits_for_all_earlier_ones() -> None:
    sequencer = Sequencer()
    first, second, third = (take(sequencer) for _ in range(3))
    order: list[int] = []

    async def go(turn: Submission, number: int) -> None:
        async with turn:
            order.append(number)

    waiting = [asyncio.ensure_future(go(third, 3)), asyncio.ensure_future(go(second, 2))]
    await asyncio.sleep(0.01)
    assert order == []
    await go(first, 1)
    await asyncio.gather(*waiting)
    assert order == [1, 2, 3]


async def test_a_failure_lets_the_next_one_go() -> None:
    sequencer = Sequencer()
    first, second = take(sequencer), take(sequencer)
    with pytest.raises(LookupError):
        async with first:
            raise LookupError
    async with asyncio.timeout(60), second:
        pass


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(["pass", "fail", "cancel waiting", "cancel inside"]), max_size=12), st.randoms()
)
def test_no_mixture_of_failures_and_cancellations_wedges_or_reorders(fates: list[str], rng: object) -> None:
    async def main() -> None:
        sequencer = Sequencer()
        turns = [(number, fate, take(sequencer)) for number, fate in enumerate(fates)]
        rng.shuffle(turns)  # type: ignore[attr-defined]
        entered: list[int] = []
        gate = asyncio.Event()

        async def go(number: int, fate: str, turn: Submission) -> None:
            async with turn:
                await gate.wait()
                entered.append(number)
                if fate == "fail":
                    raise LookupError
                if fate == "cancel inside":
                    raise asyncio.CancelledError
                await asyncio.sleep(0)

        tasks = [(fate, asyncio.ensure_future(go(number, fate, turn))) for number, fate, turn in turns]
        await asyncio.sleep(0)
        for fate, task in tasks:
            if fate == "cancel waiting":
                task.cancel()
        gate.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
            async with take(sequencer):
                pass
        assert entered == sorted(entered)
        assert set(entered) >= {number for number, fate, _ in turns if fate != "cancel waiting"}

    asyncio.run(main())
