"""The worker process is killed: the client sees a delay and the same results, and the server stays up."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tinkex
from tests.durability.killable import MODEL, KillableServer
from tests.durability.test_kill import datum, program
from tinkex import types

PATIENCE_S = 90


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    with KillableServer(tmp_path_factory.mktemp("worker"), tiny_model, often=4) as running:
        wait_until(lambda: health(running)["status"] == "ok")
        yield running
        (worker,) = running.workers()
        running.stop()
        assert not worker.is_running(), "a stopped server leaves no process behind"


def health(server: KillableServer) -> dict[str, Any]:
    """The server's health, also while it starts."""
    try:
        with urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=30) as answer:
            status: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            status = json.load(error)
    return status


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def no_worker(server: KillableServer) -> Iterator[dict[str, Any]]:
    """Inside the block there is no working worker: the first was killed, the next one is suspended before it responds."""
    while True:
        successor = next_worker(server)
        successor.suspend()
        try:
            status = health(server)
            assert status["worker"]["pid"] == successor.pid
            if status["worker"]["state"] == "starting":
                yield status
                return
        finally:
            successor.resume()


def next_worker(server: KillableServer) -> psutil.Process:
    """Kill the worker; returns its successor as soon as the server reports it."""
    (worker,) = server.workers()
    worker.kill()
    # A worker that is suspended before the server reports it is still starting.
    wait_until(lambda: health(server)["worker"]["pid"] not in (None, worker.pid))
    return psutil.Process(health(server)["worker"]["pid"])


@pytest.mark.slow
def test_a_killed_worker_is_a_delay_with_the_same_results(server: KillableServer) -> None:
    expected = program(server, lambda _: None)

    def kill_now_and_then(n: int) -> None:
        if n in {2, 7}:
            wait_until(lambda: server.kill_workers() == 1)
        if n == 4:
            server.kill_workers()
            server.restart()  # both

    assert program(server, kill_now_and_then) == expected
    wait_until(lambda: health(server)["status"] == "ok")
    restarts = health(server)["worker"]["restarts"]
    assert restarts >= 1
    metrics = urllib.request.Request(f"{server.url}/metrics", headers={"X-API-Key": server.key})
    with urllib.request.urlopen(metrics, timeout=30) as answer:
        assert f"tinkex_worker_restarts_total {restarts}" in answer.read().decode()
    assert "other digits" not in server.log


@pytest.mark.slow
def test_the_server_responds_while_there_is_no_worker(server: KillableServer) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=3)
        with no_worker(server) as status:
            assert status["status"].startswith("degraded: the worker was lost (it was terminated by SIGKILL")
            passed = training.forward_backward([datum(1)], "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
            sampled = service.create_sampling_client(base_model=MODEL).sample(
                types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=3, seed=1)
            )
            metrics = service.create_rest_client().list_training_runs().result(timeout=PATIENCE_S)
            assert metrics.training_runs
            assert not any(each.done() for each in (passed, stepped, sampled))
        assert passed.result(timeout=PATIENCE_S).metrics["loss:sum"] > 0
        assert stepped.result(timeout=PATIENCE_S).metrics
        assert sampled.result(timeout=PATIENCE_S).sequences
    wait_until(lambda: health(server)["status"] == "ok")


@pytest.mark.slow
def test_a_stream_resumes_where_it_was(server: KillableServer) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        prompt = types.ModelInput.from_ints([5, 6, 7])
        params = types.SamplingParams(max_tokens=60, stop=[], seed=3)
        expected = sampler.sample(prompt, 1, params).result(timeout=PATIENCE_S).sequences[0]
        restarts = health(server)["worker"]["restarts"]
        tokens: list[int] = []
        with sampler.sample_stream(prompt, 1, params) as stream:
            for event in stream:
                if isinstance(event, types.SampledToken):
                    tokens.append(event.token)
                    assert event.index == len(tokens) - 1
                    if len(tokens) == 5:
                        assert server.kill_workers() == 1
        assert tokens == expected.tokens
    wait_until(lambda: health(server)["worker"]["restarts"] > restarts and health(server)["status"] == "ok")


@pytest.mark.slow
def test_a_worker_exits_with_its_server(tiny_model: Path, tmp_path: Path) -> None:
    with KillableServer(tmp_path, tiny_model) as server:
        (worker,) = server.workers()
        worker.suspend()  # even a suspended one
        server.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.wait(PATIENCE_S)
        assert not worker.is_running()


@pytest.mark.slow
def test_signals_for_the_server_do_not_stop_the_worker(server: KillableServer) -> None:
    worker = next_worker(server)
    for _ in range(100):  # from the start, before it can install signal handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            worker.send_signal(number)
        time.sleep(0.01)
    with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
        service.create_lora_training_client(MODEL, rank=4, seed=3)
    wait_until(lambda: health(server)["status"] == "ok")
    assert [each.pid for each in server.workers()] == [worker.pid]
