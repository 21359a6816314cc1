"""Queue observers are notified of real queues: of queued operations, and of samples that wait for a slot."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, Backend
from tests.contract.limited import limited_embedded, limited_server
from tests.durability.killable import KillableServer
from tinkex import types
from tinkex._runtime import background
from tinkex.observability.events import CallbackFailed, Event, LogSink, QueueStateChanged
from tinkex.observability.metrics import MetricsSink

PROMPT = types.ModelInput.from_ints([5, 6, 7])
LONG = types.SamplingParams(max_tokens=400, stop=[])
SHORT = types.SamplingParams(max_tokens=1, seed=1)
STATES = {"active", "paused_capacity", "paused_rate_limit", "unknown"}


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Backend, KillableServer]]:
    with limited_server(tmp_path_factory.mktemp("limited"), tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def in_process(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    with limited_embedded(tmp_path_factory.mktemp("limited"), tiny_model) as running:
        yield running


@pytest.fixture(params=["embedded", "server"])
def limited(request: pytest.FixtureRequest) -> Backend:
    if request.param == "embedded":
        return request.getfixturevalue("in_process")  # type: ignore[no-any-return]
    return request.getfixturevalue("server")[0]  # type: ignore[no-any-return]


class Recorder:
    """Records notifications, as an event sink, as a function and as an observer."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.states: list[tuple[str, str | None]] = []
        self.threads: set[str] = set()

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        self.threads.add(threading.current_thread().name)
        self.states.append((queue_state, queue_state_reason))


def until(condition: Callable[[], Any], act: Callable[[], Any] = lambda: time.sleep(0.01)) -> None:
    """Repeats an action until a condition holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        act()


def large(start: int) -> types.Datum:
    tokens = [(start + n) % 90 + 5 for n in range(201)]
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})


@pytest.mark.slow
def test_a_run_is_notified_of_its_queued_operations_and_another_one_is_not(limited: Backend) -> None:
    recorder, other = Recorder(), Recorder()
    sink = MetricsSink(then=recorder)
    with limited.service(events=sink) as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
        idle = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
        training.queue_state_observer = recorder.on_queue_state_change
        idle.queue_state_observer = other
        passes: list[Any] = []

        def send() -> None:
            passes.extend(training.forward_backward([large(n)] * 8, "cross_entropy") for n in range(4))
            training.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=120)

        def changes_of_passes() -> list[QueueStateChanged]:
            return [
                event
                for event in recorder.events
                if isinstance(event, QueueStateChanged) and event.request_type == "ForwardBackward"
            ]

        until(lambda: any("in line" in (event.reason or "") for event in changes_of_passes()), send)
        assert all(one.result(timeout=120).metrics["loss:sum"] > 0 for one in passes)
    assert {state for state, _ in recorder.states} <= STATES
    changes_seen = [event for event in recorder.events if isinstance(event, QueueStateChanged)]
    of_runs = [event for event in changes_seen if event.request_type != "CreateModel"]  # which has no run yet
    assert {event.client for event in of_runs} == {training.model_id}
    assert sorted((e.state, e.reason) for e in changes_seen if e.client == training.model_id) == sorted(
        recorder.states
    )
    assert recorder.threads == {"tinkex callbacks"}, "not on the event loop that all clients share"
    assert other.states == []
    changes = sum(
        count
        for series, count in sink.metrics.snapshot().counters.items()
        if series.startswith("tinkex_queue_state_changes_total")
    )
    assert changes == len(changes_seen)


def waiting_sampler(service: tinkex.ServiceClient) -> tinkex.SamplingClient:
    """A sampler that polls for each sample: one poll for all would report the queue state every 20 s."""
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    opened = background().run(service.holder.opened())
    config = opened.client_config.model_copy(update={"sample_use_retrieve_futures": False})
    return tinkex.SamplingClient(
        service.holder,
        replace(opened, client_config=config),
        sampling_session_id=sampler._sampling_session_id,
    )


@pytest.mark.slow
def test_a_sampler_is_notified_that_its_samples_wait_for_a_slot(
    limited: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    sink = MetricsSink(then=LogSink())
    with (
        caplog.at_level(logging.WARNING, "tinkex"),
        limited.service() as greedy,
        limited.service(events=sink) as service,
    ):
        hog = greedy.create_sampling_client(base_model=BASE_MODEL)
        holding = [hog.sample(PROMPT, 32, LONG)]
        sampler = waiting_sampler(service)
        sampler.queue_state_observer = recorder
        waiting: list[Any] = []

        def send() -> None:
            if holding[-1].done():  # a fast machine
                holding.append(hog.sample(PROMPT, 32, LONG))
            waiting.append(sampler.sample(PROMPT, 1, SHORT))
            time.sleep(0.1)

        until(lambda: any(state == "paused_capacity" for state, _ in recorder.states), send)
        for one in holding:
            one.cancel()
        tokens = {tuple(one.result(timeout=120).sequences[0].tokens) for one in waiting}
    assert len(tokens) == 1, "the same seed: waiting changes nothing"
    reasons = [reason for state, reason in recorder.states if state == "paused_capacity"]
    assert all("wait for a place in the decode batch" in (reason or "") for reason in reasons)
    warned = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Sampling is paused for")]
    whose = [text.partition(". Reason")[0] for text in warned]
    assert len(whose) == len(set(whose)) >= 1, "each once a minute, however often it changes"
    assert any("place in the decode batch" in text for text in warned)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["a function", "an object", "a subclass", "one that wants to end the program"]
)
def test_an_observer_that_raises_does_not_affect_the_operation(limited: Backend, kind: str) -> None:
    recorder = Recorder()

    class Mistaken:
        def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
            raise (SystemExit if "end" in kind else RuntimeError)("a mistake of the program's")

    with limited.service(events=recorder) as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
        if kind == "a subclass":
            training.__class__ = type("Own", (Mistaken, tinkex.TrainingClient), {})
        else:
            training.queue_state_observer = (
                Mistaken() if kind == "an object" else Mistaken().on_queue_state_change
            )

        def send() -> None:
            passes = [training.forward_backward([large(n)] * 8, "cross_entropy") for n in range(4)]
            assert all(one.result(timeout=120).metrics["loss:sum"] > 0 for one in passes)

        until(lambda: [event for event in recorder.events if isinstance(event, CallbackFailed)], send)
    failed = next(event for event in recorder.events if isinstance(event, CallbackFailed))
    assert failed.callback == "on_queue_state_change"
    assert failed.reason.endswith(
        "Error: a mistake of the program's" if "end" not in kind else "SystemExit: a mistake of the program's"
    )


@pytest.mark.slow
def test_a_server_whose_worker_was_killed_says_so_and_the_operation_completes(
    server: tuple[Backend, KillableServer],
) -> None:
    backend, process = server
    recorder = Recorder()
    with backend.service() as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
        training.queue_state_observer = recorder
        first = training.forward_backward([large(0)], "cross_entropy").result(timeout=120)
        assert process.kill_workers() == 1
        again = training.forward_backward([large(0)], "cross_entropy").result(timeout=180)
        assert again.metrics["loss:sum"] == first.metrics["loss:sum"]
    assert ("paused_capacity", "the worker process is being started") in recorder.states
