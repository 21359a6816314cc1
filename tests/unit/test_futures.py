"""Futures, and the polling state machine as a table."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tinkex import types
from tinkex._runtime import background
from tinkex._transport.budget import ByteBudget
from tinkex._transport.caller import Caller
from tinkex._wire import proto
from tinkex._wire.endpoints import endpoint
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConflictError,
    HttpRequest,
    NotFoundError,
    RequestErrorCategory,
    RequestFailedError,
    ResultExpiredError,
    TinkexError,
    UnprocessableEntityError,
)
from tinkex.futures import (
    APIFuture,
    AwaitableConcurrentFuture,
    Failed,
    PollAgain,
    Polled,
    PollState,
    Ready,
    Results,
    gather,
    next_step,
)
from tinkex.observability.events import Event, QueueStateChanged, RetryScheduled, StillWaiting
from tinkex.testing import MockTransport, Reply, Request, reply

JSON_RESULT = Polled("req-1", wants_proto=False, about=HttpRequest("POST", "http://mock"))
PROTO_RESULT = replace(JSON_RESULT, wants_proto=True)
FRESH = PollState()
TRY_AGAIN = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "busy"}
HELD = 30.0


# ---- the table ----


def test_a_result_is_ready() -> None:
    assert isinstance(next_step(FRESH, reply({"metrics": {}}), 0.0, JSON_RESULT), Ready)
    assert isinstance(next_step(FRESH, reply(b"\x01"), 0.0, PROTO_RESULT), Ready)


@pytest.mark.parametrize(
    ("got", "queue"),
    [
        (reply(TRY_AGAIN), ("paused_capacity", "busy")),
        (reply(TRY_AGAIN, status=408), ("paused_capacity", "busy")),
        (reply({"type": "try_again", "queue_state": "odd"}), ("unknown", None)),
        (reply({"type": "try_again"}), None),
        (reply(status=408), None),
        (Reply(408, {}, b"<html>"), None),
        (reply({"detail": "x"}, status=500), None),
        (reply(status=503), None),
    ],
)
def test_a_pending_result_is_polled_again_immediately_only_after_a_long_poll(
    got: Reply, queue: tuple[str, str | None] | None
) -> None:
    held = next_step(FRESH, got, HELD, PROTO_RESULT)
    assert isinstance(held, PollAgain)
    assert (held.after, held.queue, held.state.fast_replies) == (0.0, queue, 0)
    state, waits = FRESH, []
    for _ in range(10):
        step = next_step(state, got, 0.001, PROTO_RESULT)
        assert isinstance(step, PollAgain)
        waits.append(step.after)
        state = step.state
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    calm = next_step(state, got, HELD, PROTO_RESULT)
    assert isinstance(calm, PollAgain)
    assert calm.state.fast_replies == 0


@pytest.mark.parametrize("got", [APIConnectionError(None, "cut"), reply(status=429), reply(status=400)])
def test_failed_polls_are_repeated_with_growing_back_off(got: Reply | APIConnectionError) -> None:
    state, waits = FRESH, []
    for _ in range(8):
        step = next_step(state, got, 0.0, JSON_RESULT)
        assert isinstance(step, PollAgain)
        assert step.failure
        waits.append(step.after)
        state = step.state
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    calm = next_step(state, reply(status=408), HELD, JSON_RESULT)
    assert isinstance(calm, PollAgain)
    assert calm.state.failures == 0


def test_a_longer_retry_after_is_respected() -> None:
    step = next_step(FRESH, reply(status=429, headers={"retry-after": "12"}), 0.0, JSON_RESULT)
    assert isinstance(step, PollAgain)
    assert step.after == 12


def test_the_fourth_consecutive_400_is_raised() -> None:
    refusal = reply({"detail": "bad"}, status=400)
    state = FRESH
    for _ in range(3):
        step = next_step(state, refusal, HELD, JSON_RESULT)
        assert isinstance(step, PollAgain)
        state = step.state
    failed = next_step(state, refusal, HELD, JSON_RESULT)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BadRequestError)
    reset = next_step(state, reply(status=408), HELD, JSON_RESULT)
    assert isinstance(reset, PollAgain)
    assert reset.state.bad_requests == 0


def test_a_large_result_is_announced_and_then_fetched() -> None:
    announced = reply({"status": "complete_metadata", "response_payload_size": 5000})
    step = next_step(FRESH, announced, 0.0, PROTO_RESULT)
    assert isinstance(step, PollAgain)
    assert (step.after, step.payload_bytes, step.state.allow_metadata) == (0.0, 5000, False)
    again = next_step(step.state, announced, 0.0, PROTO_RESULT)
    assert isinstance(again, Failed)
    assert isinstance(again.error, APIResponseValidationError)


def test_an_account_that_cannot_pay_is_waited_for_as_long_as_the_server_says() -> None:
    unpaid = reply({"detail": "top up"}, status=402)
    patient = replace(JSON_RESULT, payment_pause_s=10.0)
    state = FRESH
    for _ in range(2):
        step = next_step(state, unpaid, 0.0, patient)
        assert isinstance(step, PollAgain)
        assert step.after == 5.0
        state = step.state
    failed = next_step(state, unpaid, 0.0, patient)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BillingError)


@pytest.mark.parametrize(
    ("category", "expected"),
    [("user", "User"), ("server", "Server"), ("gremlins", "Unknown"), (None, "Unknown")],
)
def test_a_failed_operation_says_whose_fault_it_was(category: str | None, expected: str) -> None:
    step = next_step(FRESH, reply({"error": "too long", "category": category}), 0.0, PROTO_RESULT)
    assert isinstance(step, Failed)
    assert isinstance(step.error, RequestFailedError)
    assert (step.error.message, step.error.request_id) == ("too long", "req-1")
    assert step.error.category is RequestErrorCategory[expected]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AuthenticationError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, ResultExpiredError),
        (422, UnprocessableEntityError),
        (501, TinkexError),
    ],
)
def test_other_client_errors_end_polling_with_their_typed_error(status: int, kind: type[TinkexError]) -> None:
    step = next_step(FRESH, reply({"detail": "no"}, status=status), 0.0, JSON_RESULT)
    assert isinstance(step, Failed)
    assert isinstance(step.error, kind)


@pytest.mark.parametrize(
    ("got", "polled"),
    [
        (reply(b"\x01"), JSON_RESULT),
        (reply({"sequences": []}), PROTO_RESULT),
        (Reply(200, {}, b"<html>"), JSON_RESULT),
        (reply([1]), JSON_RESULT),
    ],
)
def test_a_result_in_the_wrong_form_is_named(got: Reply, polled: Polled) -> None:
    step = next_step(FRESH, got, 0.0, polled)
    assert isinstance(step, Failed)
    assert isinstance(step.error, APIResponseValidationError)
    assert "req-1" in str(step.error)


# ---- the driver ----


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def results(
    handler: Callable[[Request], Reply],
    sink: Recorder | None = None,
    report_interval_s: float = 60.0,
    **settings: Any,
) -> tuple[Results, MockTransport]:
    transport = MockTransport(handler)
    caller = Caller(transport, Config(api_key="tml-x", base_url="http://mock", **settings), sink=sink)
    return Results(caller, ByteBudget(100), report_interval_s=report_interval_s), transport


ACCEPTED = types.UntypedAPIFuture(request_id="req-1", sample_sequence_ids=["seq-0"])


async def test_polling_ends_with_a_typed_value() -> None:
    answers = [reply(TRY_AGAIN, status=408), reply({"metrics": {"a": 1.0}})]
    fetcher, transport = results(lambda _: answers.pop(0))
    response = await fetcher.fetch(endpoint("optim_step"), ACCEPTED, submit_s=0.25)
    assert response == types.OptimStepResponse(metrics={"a": 1.0})
    first, second = transport.requests
    assert first.body == b'{"request_id":"req-1","allow_metadata_only":true}'
    assert first.headers["x-tinker-request-type"] == "OptimStep"
    assert first.headers["x-tinker-create-promise-roundtrip-time"] == "0.250000"
    assert [r.headers["x-tinker-request-iteration"] for r in (first, second)] == ["0", "1"]
    assert "x-tinker-create-promise-roundtrip-time" not in second.headers
    assert (first.purpose, first.timeout) == ("retrieve", 45.0)


async def test_a_sample_is_requested_in_protobuf_and_gets_its_ids() -> None:
    sequence = types.SampledSequence("stop", "", np.array([1, 2], np.int32))
    body = proto.encode_sample_response(types.SampleResponse([sequence]))
    answers = [reply({"status": "complete_metadata", "response_payload_size": 10**6}), reply(body)]
    fetcher, transport = results(lambda _: answers.pop(0))
    response = await fetcher.fetch(endpoint("asample"), ACCEPTED)
    assert (response.sequences[0].sequence_id, response.sequences[0].tokens) == ("seq-0", [1, 2])
    assert transport.requests[0].headers["accept"] == "application/x-protobuf"
    assert b'"allow_metadata_only":false' in transport.requests[1].body
    assert fetcher._inflight._balance == 100


async def test_a_result_that_cannot_be_read_is_a_validation_error() -> None:
    fetcher, _ = results(lambda _: reply({"metrics": "many"}))
    with pytest.raises(APIResponseValidationError, match="req-1"):
        await fetcher.fetch(endpoint("optim_step"), ACCEPTED)


async def test_queue_states_are_emitted_when_they_change() -> None:
    paused = reply(TRY_AGAIN, status=408)
    answers = [paused, paused, reply({"type": "try_again", "queue_state": "active"}), reply({"metrics": {}})]
    recorder = Recorder()
    fetcher, _ = results(lambda _: answers.pop(0), recorder)
    await fetcher.fetch(endpoint("optim_step"), ACCEPTED)
    changes = [event for event in recorder.events if isinstance(event, QueueStateChanged)]
    assert [(c.request_type, c.state, c.reason) for c in changes] == [
        ("OptimStep", "paused_capacity", "busy"),
        ("OptimStep", "active", None),
    ]


async def test_a_pending_result_is_reported_periodically_with_its_queue_state() -> None:
    answers = [reply(TRY_AGAIN, status=408)] * 4 + [reply({"metrics": {}})]
    recorder = Recorder()
    fetcher, _ = results(
        lambda _: answers.pop(0), recorder, report_interval_s=0.0, poll_backoff=(0.001, 0.001)
    )
    await fetcher.fetch(endpoint("optim_step"), ACCEPTED)
    told = [event for event in recorder.events if isinstance(event, StillWaiting)]
    assert [(e.request_id, e.request_type, e.state, e.reason) for e in told] == [
        ("req-1", "OptimStep", "paused_capacity", "busy")
    ] * 4
    assert sorted(e.waited_s for e in told) == [e.waited_s for e in told]


@pytest.mark.parametrize("answer", [reply(TRY_AGAIN, status=408), reply({"type": "try_again"})])
async def test_fast_replies_are_followed_by_the_configured_back_off(answer: Reply) -> None:
    polled = Polled("req-1", wants_proto=False, about=JSON_RESULT.about, backoff=(0.5, 3.0))
    state, waits = PollState(), []
    for _ in range(5):
        step = next_step(state, answer, 0.0, polled)
        assert isinstance(step, PollAgain)
        waits.append(step.after)
        state = step.state
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    fetcher, _ = results(lambda _: answer, poll_backoff=(0.5, 3.0))
    assert fetcher._caller.config.poll_backoff == (0.5, 3.0)


async def test_failed_polls_are_emitted_with_their_reason() -> None:
    answers = [reply(status=503), reply({"metrics": {}})]
    recorder = Recorder()
    fetcher, _ = results(lambda _: answers.pop(0), recorder)
    await fetcher.fetch(endpoint("optim_step"), ACCEPTED)
    assert [e.reason for e in recorder.events if isinstance(e, RetryScheduled)] == ["status 503"]


# ---- what users hold ----


def finished(value: int) -> AwaitableConcurrentFuture[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return AwaitableConcurrentFuture(future)


def test_a_future_is_read_by_result_by_await_and_by_its_inner_future() -> None:
    future = finished(3)
    assert isinstance(future, APIFuture)
    assert future.result() == 3
    assert future.future() is future._future
    assert future.done()

    async def main() -> tuple[int, int]:
        return await future, await future.result_async(timeout=1)

    assert asyncio.run(main()) == (3, 3)
    assert asyncio.run(main()) == (3, 3)


def test_a_timeout_cancels_nothing() -> None:
    release = threading.Event()

    async def work() -> str:
        while not release.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.005)
        return "done"

    future = AwaitableConcurrentFuture(background().submit(work()))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.02)

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.02)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future.result_async(), 0.02)

    asyncio.run(impatient())
    assert not future.done()
    release.set()
    assert future.result(timeout=5) == "done"


def test_errors_are_raised_by_every_accessor() -> None:
    async def fail() -> None:
        raise RequestFailedError("too long", "req-1", RequestErrorCategory.User)

    future = AwaitableConcurrentFuture(background().submit(fail()))

    async def main() -> None:
        await future

    for door in (future.result, lambda: asyncio.run(main())):
        with pytest.raises(RequestFailedError, match="too long"):
            door()


def test_cancelling_stops_the_wait() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    future = AwaitableConcurrentFuture(background().submit(forever()))
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(timeout=5)


def test_waiting_on_the_client_s_own_loop_raises() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    future = AwaitableConcurrentFuture(background().submit(forever()))

    async def wait() -> None:
        future.result()

    with pytest.raises(RuntimeError, match="await"):
        background().run(wait())
    future.cancel()


def test_gathered_futures_keep_their_order() -> None:
    async def after(delay: float) -> float:
        await asyncio.sleep(delay)
        return delay

    futures = [AwaitableConcurrentFuture(background().submit(after(d))) for d in (0.03, 0.0, 0.01)]
    assert gather(*futures).result(timeout=5) == [0.03, 0.0, 0.01]


def test_gathering_stops_at_the_first_error() -> None:
    async def forever() -> int:
        await asyncio.Event().wait()
        return 0

    async def fail() -> int:
        raise LookupError("gone")

    slow = AwaitableConcurrentFuture(background().submit(forever()))
    broken = AwaitableConcurrentFuture(background().submit(fail()))
    with pytest.raises(LookupError):
        gather(slow, broken).result(timeout=5)
    assert not slow.done()
    slow.cancel()
