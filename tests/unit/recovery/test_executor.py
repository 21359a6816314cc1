"""Runs are restarted from the right checkpoint, a few at a time, as often as the policy allows."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.scripted import Request
from tests.unit.recovery.conftest import Events, Runs
from tinkex import ServiceClient, errors, types
from tinkex.observability.events import CallbackFailed, RecoveryFailed, RecoveryStarted, RunRecovered
from tinkex.recovery import Best, RecoveryExecutor, RecoveryPolicy, RecoveryResult
from tinkex.testing import Reply, reply

QUICK: dict[str, Any] = {"backoff_s": 0.001, "max_backoff_s": 0.002}


def loads(server: Runs) -> list[tuple[str, bool]]:
    return [(value.path, value.optimizer) for value in server.values("load_weights")]


def test_a_run_restarts_from_its_latest_checkpoint_with_its_optimizer(
    server: Runs, service: ServiceClient, events: Events
) -> None:
    server.save("old", "1")
    latest = server.save("old", "2")
    recovered = RecoveryExecutor(events=events).recover("old", service).result(timeout=10)
    assert isinstance(recovered, RecoveryResult)
    assert recovered.checkpoint == latest
    assert recovered.training.model_id == "sess-1:train:0"
    assert loads(server) == [(latest, True)]
    assert server.values("create_model")[0].user_metadata == {"purpose": "test"}
    assert events.seen == [
        RecoveryStarted("old", 0, latest),
        RunRecovered("old", "sess-1:train:0", latest, 0),
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_policy_chooses(server: Runs, service: ServiceClient, asynchronous: bool) -> None:
    first, second = server.save("old", "1", loss="0.5"), server.save("old", "2", loss="0.7")

    def choose(run_id: str, checkpoints: Any) -> types.Checkpoint:
        assert (run_id, [one.tinker_path for one in checkpoints]) == ("old", [second, first])
        return checkpoints[1]

    async def choose_later(run_id: str, checkpoints: Any) -> str:
        await asyncio.sleep(0)
        return choose(run_id, checkpoints).tinker_path

    executor = RecoveryExecutor()
    for choice in (Best("loss"), first, choose_later if asynchronous else choose):
        policy = RecoveryPolicy(checkpoint=choice, restore_optimizer=False)
        recovered = executor.recover("old", service, policy).result(timeout=10)
        assert recovered is not None
        assert recovered.checkpoint == first
    assert loads(server) == [(first, False)] * 3


def test_a_checkpoint_that_cannot_be_loaded_gives_way_to_the_next(
    server: Runs, service: ServiceClient
) -> None:
    older, latest = server.save("old", "1"), server.save("old", "2")
    server.unloadable = {latest}
    recovered = RecoveryExecutor().recover("old", service).result(timeout=10)
    assert recovered is not None
    assert (recovered.checkpoint, recovered.attempts) == (older, 1)


def test_a_run_whose_weights_cannot_be_loaded_is_not_left_behind(
    server: Runs, service: ServiceClient
) -> None:
    server.unloadable = {server.save("old", "1")}
    with pytest.raises(errors.RecoveryError):
        RecoveryExecutor().recover("old", service).result(timeout=10)
    for _ in range(400):  # it is unloaded without anybody waiting for it
        if server.values("unload_model"):
            break
        threading.Event().wait(0.01)
    assert [value.model_id for value in server.values("unload_model")] == ["sess-1:train:0"]


def test_where_none_can_be_loaded_the_error_names_them_all(server: Runs, service: ServiceClient) -> None:
    server.unloadable = {server.save("old", "1"), server.save("old", "2")}
    with pytest.raises(errors.RecoveryError, match=r"weights/2: .*weights/1: .*damaged"):
        RecoveryExecutor().recover("old", service).result(timeout=10)


def test_a_failure_that_may_pass_is_tried_again(
    server: Runs, service: ServiceClient, events: Events, calm: Any
) -> None:
    latest = server.save("old", "1")
    tries = []

    def create(value: types.CreateModelRequest, request: Request) -> Reply:
        tries.append(value)
        if len(tries) < 3:
            return reply({"detail": "full"}, status=503)
        return server.on_create_model(value, request)

    server.answers["create_model"] = create
    executor = RecoveryExecutor(events=events, rng=calm)
    recovered = executor.recover("old", service, RecoveryPolicy(**QUICK)).result(timeout=10)
    assert recovered is not None
    assert (recovered.attempts, recovered.checkpoint) == (3, latest)
    assert [event.after_s for event in events.of(RecoveryFailed)] == [0.001, 0.002]


def test_when_all_attempts_are_used_up_the_failure_is_reported(
    server: Runs, service: ServiceClient, events: Events
) -> None:
    server.save("old", "1")
    server.answers["create_model"] = lambda value, request: reply({"detail": "full"}, status=503)
    reported = []
    policy = RecoveryPolicy(max_attempts=2, on_failure=lambda *news: reported.append(news), **QUICK)
    with pytest.raises(errors.RecoveryError, match="in 2 attempts") as caught:
        RecoveryExecutor(events=events).recover("old", service, policy).result(timeout=10)
    assert isinstance(caught.value.__cause__, errors.InternalServerError)
    assert reported == [("old", caught.value)]
    assert [event.after_s is None for event in events.of(RecoveryFailed)] == [False, True]


@pytest.mark.parametrize("trouble", ["no checkpoint", "wrong key"])
def test_what_will_not_pass_uses_up_no_attempts(
    server: Runs, service: ServiceClient, events: Events, trouble: str
) -> None:
    if trouble == "wrong key":
        server.save("old", "1")
        server.answers["create_model"] = lambda value, request: reply({"detail": "who?"}, status=401)
    with pytest.raises(errors.RecoveryError):
        RecoveryExecutor(events=events).recover("old", service, RecoveryPolicy(max_attempts=9)).result(10)
    assert [event.attempt for event in events.of(RecoveryFailed)] == [0]


def test_a_run_the_server_forgot_restarts_from_what_was_known(server: Runs, service: ServiceClient) -> None:
    path = server.save("old", "1")
    known = server.checkpoints["old"]
    server.gone.add("old")
    executor = RecoveryExecutor()
    with pytest.raises(errors.RecoveryError, match="no checkpoint"):
        executor.recover("old", service).result(timeout=10)
    recovered = executor.recover("old", service, known=known).result(timeout=10)
    assert recovered is not None
    assert recovered.checkpoint == path


def test_an_unreachable_run_that_is_well_after_all_is_left_alone(
    server: Runs, service: ServiceClient
) -> None:
    server.save("old", "1")
    assert RecoveryExecutor().recover("old", service, condition="unreachable").result(timeout=10) is None
    assert not loads(server)


@pytest.mark.slow
def test_no_more_than_so_many_restart_simultaneously_and_a_waiting_run_leaves_its_place(
    server: Runs, service: ServiceClient
) -> None:
    """One place: the first run's failed attempt must let the second pass before it tries again."""
    for run in ("first", "second"):
        server.save(run, "1")
    at_once, most, order = 0, 0, []
    lock = threading.Lock()

    async def load(value: types.LoadWeightsRequest, request: Request) -> Reply:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        await asyncio.sleep(0.01)
        with lock:
            at_once -= 1
        order.append(value.path)
        if order == ["tinker://first/weights/1"]:
            return reply({"detail": "full"}, status=503)
        return server.on_load_weights(value, request)

    server.answers["load_weights"] = load
    executor = RecoveryExecutor(max_concurrent=1)
    policy = RecoveryPolicy(backoff_s=0.2)
    futures = [executor.recover(run, service, policy) for run in ("first", "second")]
    assert executor.recover("first", service) is futures[0]
    assert executor.in_flight == ("first", "second")
    for future in futures:
        assert future.result(timeout=20) is not None
    assert most == 1
    assert order == [f"tinker://{run}/weights/1" for run in ("first", "second", "first")]
    assert executor.in_flight == ()


def test_callbacks_may_use_the_client_and_their_errors_are_events(
    server: Runs, service: ServiceClient, events: Events
) -> None:
    server.save("old", "1")
    found = []

    def use(recovered: RecoveryResult) -> None:
        found.append(recovered.training.get_info().model_id)  # a blocking call
        raise ZeroDivisionError("mine")

    recovered = (
        RecoveryExecutor(events=events)
        .recover("old", service, RecoveryPolicy(on_recovery=use))
        .result(timeout=10)
    )
    assert recovered is not None
    assert found == [recovered.training.model_id]
    assert events.of(CallbackFailed) == [CallbackFailed("on_recovery", "ZeroDivisionError: mine")]


def test_a_session_that_is_gone_with_the_run_is_followed_by_another_one(
    server: Runs, service: ServiceClient
) -> None:
    path = server.save("old", "one")
    service.create_lora_training_client("toy", rank=2)  # opens a session
    server.gone.add("old")
    server.answers["session_heartbeat"] = lambda value, request: reply({"detail": "unknown"}, status=404)
    known = server.checkpoints["old"]
    recovered = RecoveryExecutor().recover("old", service, known=known).result(timeout=20)
    assert recovered is not None
    assert recovered.checkpoint == path
    assert server.names().count("create_session") == 2


async def test_the_result_can_be_awaited(server: Runs, service: ServiceClient) -> None:
    server.save("old", "1")
    recovered = await RecoveryExecutor().recover("old", service)
    assert recovered is not None


def test_callbacks_that_never_return_hold_up_neither_each_other_nor_other_restarts(
    server: Runs, service: ServiceClient, events: Events
) -> None:
    released, started = threading.Event(), threading.Semaphore(0)

    def never(recovered: RecoveryResult) -> None:
        assert threading.current_thread().daemon, "the program may end meanwhile"
        started.release()
        released.wait(60)

    executor = RecoveryExecutor(events=events)
    runs = [f"old-{number}" for number in range(50)]  # more than a loop has threads for
    for run in runs:
        server.save(run, "1")
    waiting = [executor.recover(run, service, RecoveryPolicy(on_recovery=never)) for run in runs]
    try:
        for _ in runs:
            assert started.acquire(timeout=60)
        server.save("other", "1")
        assert executor.recover("other", service).result(timeout=60) is not None
    finally:
        released.set()
    assert all(one.result(timeout=60) is not None for one in waiting)


def test_a_chooser_that_raises_is_reported_and_leaves_nothing_in_between(
    server: Runs, service: ServiceClient, events: Events
) -> None:
    server.save("old", "1")
    reported: list[Any] = []

    def choose(run_id: str, checkpoints: Any) -> Any:
        return {}["best"]

    policy = RecoveryPolicy(
        checkpoint=choose, on_failure=lambda run_id, error: reported.append((run_id, error)), **QUICK
    )
    executor = RecoveryExecutor(events=events)
    with pytest.raises(errors.RecoveryError, match="checkpoint function for run old raised KeyError"):
        executor.recover("old", service, policy).result(timeout=10)
    assert [run_id for run_id, _ in reported] == ["old"]
    assert [event.after_s for event in events.of(RecoveryFailed)] == [None]
    assert executor.in_flight == ()
    assert executor.recover("old", service).result(timeout=10) is not None


def test_there_is_at_least_one_place() -> None:
    with pytest.raises(ValueError, match="max_concurrent"):
        RecoveryExecutor(max_concurrent=0)
