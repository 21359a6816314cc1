"""Monitored runs: failures are found and recovered from, and monitoring continues."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.unit.recovery.conftest import Events, Runs
from tinkex import ServiceClient, errors
from tinkex.futures import AwaitableConcurrentFuture
from tinkex.observability.events import RunCheckFailed, RunRecovered, RunUnhealthy
from tinkex.recovery import RecoveryExecutor, RecoveryMonitor, RecoveryPolicy, RecoveryResult

QUICK: dict[str, Any] = {"backoff_s": 0.001, "max_backoff_s": 0.002}
SLOW: dict[str, Any] = {"poll_interval_s": 600.0, **QUICK}


class Waiting:
    """Callbacks that a test can wait for."""

    def __init__(self) -> None:
        self.news: list[Any] = []
        self._called = threading.Semaphore(0)

    def __call__(self, *news: Any) -> None:
        self.news.append(news)
        self._called.release()

    def wait(self) -> Any:
        assert self._called.acquire(timeout=20), "no callback"
        return self.news[-1]


def test_a_corrupted_run_is_found_restarted_and_watched_on_again_and_again(
    server: Runs, service: ServiceClient, events: Events
) -> None:
    recovered = Waiting()
    policy = RecoveryPolicy(poll_interval_s=0.01, on_recovery=recovered, **QUICK)
    server.save("old", "1")
    with RecoveryMonitor(service, policy, events=events) as monitor:
        monitor.watch("old")
        server.corrupted.add("old")
        (first,) = recovered.wait()
        server.save(first.training.model_id, "2")
        server.corrupted.add(first.training.model_id)
        (second,) = recovered.wait()
    assert (second.run_id, second.condition) == (first.training.model_id, "corrupted")
    assert second.checkpoint == f"tinker://{first.training.model_id}/weights/2"
    assert [event.run_id for event in events.of(RunUnhealthy)][:2] == ["old", first.training.model_id]


def test_a_lost_run_restarts_from_a_checkpoint_seen_before(server: Runs, service: ServiceClient) -> None:
    recovered = Waiting()
    path = server.save("old", "1")
    with RecoveryMonitor(service, RecoveryPolicy(on_recovery=recovered, **SLOW)) as monitor:
        monitor.watch("old")
        assert monitor.check().result(timeout=10) == {"old": None}
        server.gone.add("old")
        assert monitor.check().result(timeout=10) == {"old": "lost"}
        (news,) = recovered.wait()
        assert (news.condition, news.checkpoint) == ("lost", path)
        assert not news.training.model_id.startswith("old")


def test_a_silent_server_is_given_time_and_a_run_that_is_well_again_is_not_restarted(
    server: Runs, service: ServiceClient, events: Events
) -> None:
    patient = RecoveryPolicy(unreachable_after_s=600.0, **SLOW)
    hasty = RecoveryPolicy(unreachable_after_s=1e-9, max_attempts=100, **SLOW)
    server.save("old", "1")
    with RecoveryMonitor(service, patient, events=events) as monitor:
        monitor.watch("old")
        server.down = True
        assert monitor.check().result(timeout=10) == {"old": None}
        assert [event.run_id for event in events.of(RunCheckFailed)] == ["old"]
        monitor.watch("old", hasty)
        assert monitor.check().result(timeout=10) == {"old": "unreachable"}
        recovering = monitor.report("old", errors.APIConnectionError())
        server.down = False
        assert recovering.result(timeout=20) is None
        assert monitor.watched == ("old",)
        assert monitor.check().result(timeout=10) == {"old": None}
    assert not events.of(RunRecovered)


def test_an_unreachable_run_that_was_corrupt_meanwhile_is_restarted(
    server: Runs, service: ServiceClient
) -> None:
    server.save("old", "1")
    policy = RecoveryPolicy(unreachable_after_s=1e-9, max_attempts=100, **SLOW)
    with RecoveryMonitor(service, policy) as monitor:
        monitor.watch("old")
        server.down = True
        monitor.check().result(timeout=10)
        waiting = monitor.report("old", errors.APIConnectionError())
        server.corrupted.add("old")
        server.down = False
        recovered = waiting.result(timeout=20)
        assert isinstance(recovered, RecoveryResult)
        assert monitor.watched == (recovered.training.model_id,)


@pytest.mark.parametrize("status", [404, 410])
def test_an_operation_that_found_its_run_gone_is_enough(
    server: Runs, service: ServiceClient, status: int
) -> None:
    path = server.save("old", "1")
    error = errors.status_error(errors.HttpResponse(status), None)
    with RecoveryMonitor(service, RecoveryPolicy(**SLOW)) as monitor:
        monitor.watch("old")
        recovered = monitor.report("old", error).result(timeout=10)
    assert recovered is not None
    assert recovered.checkpoint == path


def test_an_error_of_the_users_own_restarts_nothing(server: Runs, service: ServiceClient) -> None:
    with RecoveryMonitor(service, RecoveryPolicy(**SLOW)) as monitor:
        monitor.watch("old")
        assert monitor.report("old", ValueError("mine")).result(timeout=10) is None
        with pytest.raises(ValueError, match="not watched"):
            monitor.report("other", ValueError("mine"))


def test_a_run_that_cannot_be_restarted_is_reported_once_and_no_longer_watched(
    server: Runs, service: ServiceClient
) -> None:
    failed = Waiting()
    server.corrupted.add("old")  # and it has no checkpoint
    policy = RecoveryPolicy(poll_interval_s=0.01, on_failure=failed, **QUICK)
    with RecoveryMonitor(service, policy) as monitor:
        monitor.watch("old")
        run_id, error = failed.wait()
        assert run_id == "old"
        assert isinstance(error, errors.RecoveryError)
        for _ in range(200):
            if not monitor.watched:
                break
            threading.Event().wait(0.01)
        assert monitor.watched == ()
    assert len(failed.news) == 1


def test_a_closed_monitor_asks_no_more(server: Runs, service: ServiceClient) -> None:
    monitor = RecoveryMonitor(service, RecoveryPolicy(poll_interval_s=0.005, **QUICK))
    monitor.watch("old")
    assert monitor.stop_watching("old")
    assert not monitor.stop_watching("old")
    monitor.watch("old")
    monitor.close()
    with pytest.raises(errors.ClosedError):
        monitor.watch("old")
    asked = len(server.calls)
    threading.Event().wait(0.05)
    assert len(server.calls) - asked <= 1  # one question may have been on its way


def test_the_watch_ends_with_the_client(server: Runs) -> None:
    with ServiceClient(transport=server.transport) as service:
        monitor = RecoveryMonitor(service, RecoveryPolicy(**SLOW))
        monitor.watch("old")
    assert monitor.check().result(timeout=10) == {"old": None}
    assert monitor.watched == ()
    monitor.close()


def test_trouble_that_is_reported_many_times_is_one_recovery(
    server: Runs, service: ServiceClient, events: Events
) -> None:
    server.save("old", "1")
    server.corrupted.add("old")
    with RecoveryMonitor(service, RecoveryPolicy(**SLOW), events=events) as monitor:
        monitor.watch("old")
        reports = [monitor.report("old", errors.APIConnectionError()) for _ in range(8)]
        recovered = {id(report.result(timeout=20)) for report in reports}
        late = monitor.report("old", errors.APIConnectionError())
        recovered.add(id(late.result(timeout=20)))
    assert len(recovered) == 1
    assert len(events.of(RunRecovered)) == len(events.of(RunUnhealthy)) == 1


async def test_it_works_from_an_event_loop(server: Runs, service: ServiceClient) -> None:
    server.save("old", "1")
    server.corrupted.add("old")
    async with RecoveryMonitor(service, RecoveryPolicy(**SLOW)) as monitor:
        monitor.watch("old")
        recovered = await monitor.report("old", errors.APIConnectionError())
        assert recovered is not None


def test_a_chooser_that_raises_ends_the_watch_in_words(server: Runs, service: ServiceClient) -> None:
    failed = Waiting()
    server.save("old", "1")
    server.corrupted.add("old")

    def choose(run_id: str, checkpoints: Any) -> Any:
        raise KeyError("best")

    policy = RecoveryPolicy(checkpoint=choose, on_failure=failed, **SLOW)
    with RecoveryMonitor(service, policy) as monitor:
        monitor.watch("old")
        assert monitor.check().result(timeout=10) == {"old": "corrupted"}
        run_id, error = failed.wait()
        assert run_id == "old"
        assert "KeyError" in str(error)
        with pytest.raises(errors.RecoveryError, match="KeyError"):
            monitor.report("old", errors.APIConnectionError()).result(timeout=10)
        assert monitor.watched == ()


def test_a_cancelled_restart_begins_again_at_the_next_round(server: Runs, service: ServiceClient) -> None:
    server.save("old", "1")
    server.corrupted.add("old")
    choosing, may_choose = threading.Event(), threading.Event()

    def choose(run_id: str, checkpoints: Any) -> Any:
        choosing.set()
        may_choose.wait(20)
        return checkpoints[0]

    recovered = Waiting()
    executor = RecoveryExecutor()
    policy = RecoveryPolicy(checkpoint=choose, on_recovery=recovered, **SLOW)
    with RecoveryMonitor(service, policy, executor=executor) as monitor:
        monitor.watch("old")
        monitor.check().result(timeout=10)
        assert choosing.wait(20)
        in_flight = executor.recover("old", service)
        assert isinstance(in_flight, AwaitableConcurrentFuture)
        in_flight.cancel()
        may_choose.set()
        deadline = time.monotonic() + 20
        while not recovered.news:
            monitor.check().result(timeout=10)
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_two_monitors_that_share_an_executor_restart_a_run_once(
    server: Runs, service: ServiceClient, events: Events
) -> None:
    server.save("old", "1")
    may_choose = threading.Event()

    def choose(run_id: str, checkpoints: Any) -> Any:
        may_choose.wait(20)
        return checkpoints[0]

    executor = RecoveryExecutor(events=events)
    policy = RecoveryPolicy(checkpoint=choose, **SLOW)
    gone = errors.status_error(errors.HttpResponse(404), None)
    with (
        RecoveryMonitor(service, policy, executor=executor, events=events) as one,
        RecoveryMonitor(service, policy, executor=executor, events=events) as other,
    ):
        for monitor in (one, other):
            monitor.watch("old")
        in_flight = [monitor.report("old", gone) for monitor in (one, other)]
        deadline = time.monotonic() + 20
        while len(events.of(RunUnhealthy)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        may_choose.set()
        first, second = (report.result(timeout=20) for report in in_flight)
    assert first is not None
    assert first is second
    assert len(events.of(RunRecovered)) == 1
