"""Ctrl-C at any line of the loop: what is saved is what was done, and the run resumes as if it had never stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

import tinkex
from tests.unit.train.test_runs import chats, losses, service, sft
from tinkex import train
from tinkex.train import loop
from tinkex.train.interrupts import Interrupts

__all__ = ["chats", "service"]

STEPS = 3


class AtLine:
    """Sends this process an interrupt before the ``wanted``-th line of the loop's own code is run."""

    def __init__(self, wanted: int | None) -> None:
        self._wanted, self.seen, self.count = wanted, "", 0

    def __enter__(self) -> Self:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, value: Any) -> Any:
        return self._stepped if frame.f_code.co_filename == loop.__file__ else None

    def _stepped(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "line" and frame.f_code.co_name in (
            "_submit",
            "_submit_step",
            "_collect",
            "_evaluate_and_save",
        ):
            self.count += 1
            if self.count == self._wanted:
                self.seen = f"{frame.f_code.co_name}:{frame.f_lineno}"
                os.kill(os.getpid(), signal.SIGINT)
        return self._stepped


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_at_any_line_loses_and_repeats_no_step(
    service: tinkex.ServiceClient, chats: Path, tmp_path: Path
) -> None:
    wanted = {
        "steps": STEPS,
        "eval_fraction": 0,
        "sample_tokens": 1,
        "rank": 2,
        "batch_size": 1,
        "accumulate": 2,
    }
    with AtLine(None) as lines:
        whole = train.run(service, sft(chats, tmp_path / "whole", **wanted))
    assert lines.count > 20 * STEPS
    stopped = set()
    for place in range(3, lines.count, 8):
        output = tmp_path / f"at-{place}"
        with AtLine(place) as at, pytest.raises(KeyboardInterrupt):
            train.run(service, sft(chats, output, **wanted))
        stopped.add(at.seen.split(":")[0])
        resumed = train.resume(service, output)
        assert [line["step"] for line in resumed.metrics] == list(range(1, STEPS + 1)), at.seen
        assert losses(resumed) == pytest.approx(losses(whole), abs=2e-4), at.seen
    assert stopped == {"_submit", "_submit_step", "_collect", "_evaluate_and_save"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _held_once(done: list[str]) -> None:
    with Interrupts() as interrupts:
        with interrupts.critical:
            _interrupt()
            done.append("the block")
        done.append("after it")


def _held_twice(done: list[str]) -> None:
    with Interrupts() as interrupts, interrupts.critical:
        _interrupt()
        _interrupt()
        done.append("after the second")


def _not_held(done: list[str]) -> None:
    with Interrupts():
        _interrupt()
        done.append("after the only one")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("act", "expected"), [(_held_once, ["the block"]), (_held_twice, []), (_not_held, [])]
)
def test_a_held_interrupt_is_raised_when_the_block_ends_and_a_second_one_immediately(
    act: Callable[[list[str]], None], expected: list[str]
) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        act(done)
    assert done == expected


def test_a_programs_own_handler_and_other_threads_are_left_alone() -> None:
    def own(number: int, frame: FrameType | None) -> None: ...

    before = signal.signal(signal.SIGINT, own)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is own
        thread = threading.Thread(target=lambda: Interrupts().__enter__())
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
