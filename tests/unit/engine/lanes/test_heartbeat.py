"""A worker that hangs is detected, reported, and then replaced; its call runs again with the same result."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.engine.lanes.test_worker_process import ALIKE, PATIENCE_S, pid, wait_until
from tests.unit.engine.test_engine import Caller, config, forward_backward, optim_step
from tinkex.engine.engine import Engine
from tinkex.engine.lanes import heartbeat

pytestmark = pytest.mark.slow


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.05)
    monkeypatch.setattr(heartbeat, "TIMEOUT_S", 0.5)


@pytest.fixture
def engine(impatient: None, tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    opened = Engine(config(tmp_path, tiny_model, worker="process", **ALIKE))
    opened.start()
    opened.load_models().result(PATIENCE_S)
    yield opened
    opened.close()


def state(engine: Engine) -> str:
    assert engine.backend.status is not None
    return engine.backend.status.state


def test_a_suspended_worker_is_detected_and_continues_when_it_is_resumed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "MAX_MISSED", 10**6)
    ada = Caller(engine)
    run = ada.create()
    worker = pid(engine)
    os.kill(worker, signal.SIGSTOP)
    request_id = ada.submit(optim_step(run, 1))
    wait_until(lambda: state(engine) == "silent")
    wait_until(lambda: engine.health.status.startswith("degraded"))
    assert f"process {worker}) does not respond" in engine.health.status
    assert f"kill -CONT {worker}" in engine.health.status
    state_seen = engine.queue_state(request_id)
    assert state_seen.state == "paused_capacity"
    assert "does not respond" in state_seen.reason
    os.kill(worker, signal.SIGCONT)
    assert not ada.outcome(request_id).error
    wait_until(lambda: engine.health.status == "ok")
    assert pid(engine) == worker


def test_a_worker_without_heartbeats_is_replaced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = Caller(engine)
    run = ada.create()
    expected = ada.run(forward_backward(run, 1)).metrics
    worker = pid(engine)
    monkeypatch.setattr(heartbeat, "MAX_MISSED", 3)
    os.kill(worker, signal.SIGSTOP)
    request_id = ada.submit(forward_backward(run, 2))
    wait_until(lambda: engine.backend.status is not None and engine.backend.status.pid not in {None, worker})
    monkeypatch.setattr(heartbeat, "MAX_MISSED", 10**6)  # a new one may be slow on a busy machine
    assert not ada.outcome(request_id).error
    assert ada.run(forward_backward(run, 3)).metrics == expected
    wait_until(lambda: engine.health.status == "ok")


def test_consecutive_missed_heartbeats_are_counted(impatient: None) -> None:
    here, there = socket.socketpair()
    noted: list[int] = []
    over = threading.Event()
    listening = threading.Thread(target=heartbeat.monitor, args=(here, over, noted.append))
    with here, there:
        listening.start()
        wait_until(lambda: noted[-2:] == [1, 2])
        answering = threading.Thread(target=heartbeat.answer, args=(there,))
        answering.start()
        wait_until(lambda: 0 in noted)
        there.shutdown(socket.SHUT_RDWR)
        listening.join(PATIENCE_S)
        answering.join(PATIENCE_S)
    assert not listening.is_alive()
    assert not answering.is_alive()
