"""Ctrl-C at any place of a call: no number is lost, no lock is kept, and what is called next completes."""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest

import tinkex
from tests.scripted import ScriptedServer
from tinkex import types
from tinkex.clients.service import ServiceClient

SOURCE = Path(tinkex.__file__).parent
TRACED = (str(SOURCE / "clients"), str(SOURCE / "_runtime"), str(SOURCE / "futures.py"))
DATA = [types.Datum(types.ModelInput.from_ints([1, 2]))]
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)


@functools.cache
def operations(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


class InterruptAt:
    """Interrupts the client's code at the ``wanted``-th place where the interpreter looks for signals.

    It looks after calls, where functions begin and where loops turn; nowhere else can Ctrl-C come.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted, self._count, self.seen = wanted, 0, ""
        self._before: dict[FrameType, str] = {}

    def __enter__(self) -> Self:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, value: Any) -> Any:
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "return":
            self._before.pop(frame, None)
        elif event == "opcode":
            before = self._before.get(frame, "")
            self._before[frame] = operations(frame.f_code).get(frame.f_lasti, "")
            if before.startswith(("CALL", "RESUME")) or "JUMP_BACKWARD" in before:
                self._count += 1
                if self._count == self._wanted:
                    self.seen = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                    self._before.clear()
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._stepped


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def service(server: ScriptedServer) -> Iterator[ServiceClient]:
    with ServiceClient(transport=server.transport) as service:
        yield service


def interrupted_everywhere(act: Callable[[], Any], after: Callable[[], Any]) -> int:
    """Calls ``act``, interrupted at one place after the other, and ``after`` each time; says how many there are."""
    place = 0
    while True:
        place += 1
        with InterruptAt(place) as at:
            try:
                act()
            except KeyboardInterrupt:
                assert at.seen
        if not at.seen:
            return place - 1
        done = threading.Event()
        went_on = threading.Thread(target=lambda done=done: (after(), done.set()), daemon=True)
        went_on.start()  # in a thread of its own: a lock that is kept would hold up the test for ever
        assert done.wait(30), f"nothing continues after an interrupt at {at.seen}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("operation", ["forward_backward", "optim_step", "save_state"])
def test_no_number_of_a_run_is_lost(server: ScriptedServer, service: ServiceClient, operation: str) -> None:
    training = service.create_lora_training_client("toy", rank=8)
    act: dict[str, Callable[[], Any]] = {
        "forward_backward": lambda: training.forward_backward(DATA, "cross_entropy"),
        "optim_step": lambda: training.optim_step(types.AdamParams()),
        "save_state": lambda: training.save_state("name"),
    }
    act[operation]()  # whatever is imported at the first call is there
    after = functools.partial(training.forward, DATA, "cross_entropy")
    assert interrupted_everywhere(act[operation], lambda: after().result(timeout=30)) > 20
    numbers = [value.seq_id for _, value in server.calls if getattr(value, "seq_id", None) is not None]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_samples_and_requests_continue(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="toy")
    training = service.create_lora_training_client("toy", rank=8)

    def act() -> None:
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=30)
        training.get_info()
        training.save_weights_and_get_sampling_client()

    def after() -> None:
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=30)
        training.save_weights_and_get_sampling_client()

    act()
    assert interrupted_everywhere(act, after) > 20
