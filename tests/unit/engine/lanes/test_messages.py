from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator

import pytest

from tinkex.engine.lanes.interface import CorruptState
from tinkex.engine.lanes.messages import Channel, Disconnected, RemoteCallee, RemoteCaller, RemoteFailure
from tinkex.errors import EngineError, InvalidInput, NumericalError, SetupError, UnknownObject

logger = logging.getLogger("tinkex.engine.tested")


class Unsendable(Exception):
    def __init__(self, one: str, other: threading.Lock) -> None:
        super().__init__(f"{one}!")
        self.other = other


class Target:
    """The called object; it reports progress to ``callee``."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.callee: RemoteCallee | None = None

    def add(self, one: int, *, other: int) -> int:
        return one + other

    def note(self, text: str) -> None:
        self.texts.append(text)
        logger.warning("noted %s", text)

    def notes(self) -> list[str]:
        return self.texts

    def fail(self, error: Exception) -> None:
        raise error

    def break_down(self) -> None:
        raise Unsendable("broken", threading.Lock())

    def work(self) -> str:
        assert self.callee is not None
        self.callee.progress("loading", 1, None)
        logger.warning("half %s", "way")
        return "done"


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def progress() -> list[tuple[str, int, int | None]]:
    return []


@pytest.fixture
def caller(target: Target, progress: list[tuple[str, int, int | None]]) -> Iterator[RemoteCaller]:
    here, there = (Channel(end) for end in socket.socketpair())
    target.callee = callee = RemoteCallee(there)
    logger.addHandler(callee)
    serving = threading.Thread(target=callee.serve, args=(target,))
    serving.start()
    yield RemoteCaller(here, lambda *args: progress.append(args))
    here.close()
    serving.join(30)
    assert not serving.is_alive()
    logger.removeHandler(callee)
    there.close()


def test_a_call_returns_the_methods_result(caller: RemoteCaller) -> None:
    assert caller.call("add", 2, other=3) == 5


def test_calls_in_one_message_have_their_results_and_errors_in_order(caller: RemoteCaller) -> None:
    results: list[object] = []
    errors = [InvalidInput("not this"), ValueError("nor this")]
    caller.call_each("fail", [(error,) for error in errors], results)
    assert [type(result) for result in results] == [InvalidInput, ValueError]
    caller.call_each("note", [(str(number),) for number in range(200)], results)
    assert caller.call("notes") == [str(number) for number in range(200)]
    assert results[2:] == [None] * 200
    caller.call_each("notes", [], results)
    assert len(results) == 202


def test_results_that_arrived_before_the_connection_was_lost_are_kept() -> None:
    here, there = (Channel(end) for end in socket.socketpair())
    caller, results = RemoteCaller(here, None), list[object]()

    def answer_one() -> None:
        there.receive()
        there.send(("result", 1))
        there.close()

    answering = threading.Thread(target=answer_one)
    answering.start()
    with pytest.raises(Disconnected):
        caller.call_each("add", [(1,), (2,)], results)
    answering.join(30)
    here.close()
    assert results == [1]


@pytest.mark.parametrize(
    "kind", [InvalidInput, NumericalError, UnknownObject, SetupError, CorruptState, OSError]
)
def test_errors_keep_their_type(caller: RemoteCaller, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="it does not work") as raised:
        caller.call("fail", kind("it does not work"))
    if issubclass(kind, EngineError):
        assert isinstance(raised.value, EngineError)
        assert raised.value.status == kind.status
    assert caller.call("add", 1, other=1) == 2


def test_an_os_error_keeps_its_errno(caller: RemoteCaller) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        caller.call("fail", FileNotFoundError(2, "no such file", "/gone"))
    assert (raised.value.errno, raised.value.filename) == (2, "/gone")


def test_an_unexpected_error_carries_the_workers_traceback(caller: RemoteCaller) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        caller.call("fail", ZeroDivisionError("by nothing"))
    assert "in fail" in raised.value.__notes__[0]


def test_an_error_that_cannot_be_pickled_keeps_its_text(caller: RemoteCaller) -> None:
    with pytest.raises(RemoteFailure, match="Unsendable: broken!"):
        caller.call("break_down")


def test_casts_run_in_order_and_without_a_reply(caller: RemoteCaller) -> None:
    for text in ("one", "two"):
        caller.cast("note", text)
    assert caller.call("notes") == ["one", "two"]


class RecordingHandler(logging.Handler):
    """Records what is logged on the thread that created it; the other end of these tests logs on another."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if threading.get_ident() == self.thread:
            self.texts.append(record.getMessage())


def test_progress_and_logs_come_before_the_result(
    caller: RemoteCaller, progress: list[tuple[str, int, int | None]]
) -> None:
    handler = RecordingHandler()
    logger.addHandler(handler)
    try:
        assert caller.call("work") == "done"
    finally:
        logger.removeHandler(handler)
    assert progress == [("loading", 1, None)]
    assert handler.texts == ["half way"]


def test_records_of_other_threads_do_not_wait_for_one_that_is_being_sent(target: Target) -> None:
    here, there = socket.socketpair()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    channel, other = Channel(here), Channel(there)
    callee = RemoteCallee(other)
    logger.addHandler(callee)
    serving = threading.Thread(target=callee.serve, args=(target,))
    serving.start()
    try:
        channel.send(("call", "note", ("x" * 1_000_000,), {}))
        assert here.recv(1)  # it is being sent, and cannot be until this end reads it
        logging_here = threading.Thread(target=logger.warning, args=("of another thread",), daemon=True)
        logging_here.start()
        logging_here.join(60)
        assert not logging_here.is_alive()
    finally:
        channel.close()
        serving.join(60)
        logger.removeHandler(callee)
        other.close()


def test_a_closed_other_end_is_one_error_for_every_caller() -> None:
    here, there = (Channel(end) for end in socket.socketpair())
    caller = RemoteCaller(here, None)
    there.close()
    caller.cast("note", "it is dropped")
    with pytest.raises(Disconnected):
        caller.call("add", 1, other=1)
    here.close()
