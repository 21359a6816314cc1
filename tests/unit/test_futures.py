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

from tests.recording import Recorder
from tinkex import types
from tinkex._runtime import background
from tinkex._transport.budget import ByteBudget
from tinkex._transport.caller import Caller
from tinkex._transport.polling import Failed, PollAgain, Polled, PollState, Ready, next_step
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
from tinkex.futures import APIFuture, AwaitableConcurrentFuture, Results, gather
from tinkex.observability.events import QueueStateChanged, RetryScheduled, StillWaiting
from tinkex.testing import MockTransport, Reply, Request, reply

JSON_RESULT = Polled("req-1", wants_proto=False, about=HttpRequest("POST", "http://mock"))
PROTO_RESULT = replace(JSON_RESULT, wants_proto=True)
FRESH = PollState()
TRY_AGAIN = {"type": "try_again", "queue_state": "active", "queue_state_reason": "busy"}
PAUSED = {**TRY_AGAIN, "queue_state": "paused_capacity"}
HELD = 30.0


# ---- the table ----


def test_a_result_is_ready() -> None:
    assert isinstance(next_step(FRESH, reply({"metrics": {}}), 0.0, JSON_RESULT), Ready)
    assert isinstance(next_step(FRESH, reply(b"\x01"), 0.0, PROTO_RESULT), Ready)


@pytest.mark.parametrize(
    ("got", "queue"),
    [
        (reply(TRY_AGAIN), ("active", "busy")),
        (reply(TRY_AGAIN, status=408), ("active", "busy")),
        (reply({"type": "try_again", "queue_state": "odd"}), ("unknown", None)),
        (reply({"type": "try_again"}), None),
        (reply({"status": "try_again", "queue_state": "active"}), ("active", None)),
        (reply({"status": "pending"}), None),
        (reply({"status": "pending", "queue_state": "active"}), ("active", None)),
        (reply({"status": "pending", "error": None, "result": None}), None),
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


@pytest.mark.parametrize(
    ("sent", "known"),
    [(" PAUSED_Capacity ", "paused_capacity"), ("ACTIVE", "active"), ("new", "unknown"), ("", "unknown")],
)
def test_a_queue_state_is_read_in_any_case(sent: str, known: str) -> None:
    step = next_step(FRESH, reply({"type": "try_again", "queue_state": sent}), 0.001, PROTO_RESULT)
    assert isinstance(step, PollAgain)
    assert step.queue == (known, None)


@pytest.mark.parametrize("queue_state", ["paused_capacity", "paused_rate_limit"])
@pytest.mark.parametrize("got", [{"type": "try_again"}, {"status": "pending"}, 408], ids=str)
def test_a_paused_operation_is_polled_every_second(got: Any, queue_state: str) -> None:
    body = {"type": "try_again"} if got == 408 else got
    paused = reply({**body, "queue_state": queue_state}, status=408 if got == 408 else 200)
    state = FRESH
    for _ in range(3):
        step = next_step(state, paused, 0.001, PROTO_RESULT)
        assert isinstance(step, PollAgain)
        assert (step.after, step.queue) == (1.0, (queue_state, None))
        state = step.state
    held = next_step(state, paused, HELD, PROTO_RESULT)
    assert isinstance(held, PollAgain)
    assert held.after == 0.0, "the server has waited already"
    resumed = next_step(state, reply(TRY_AGAIN), 0.001, PROTO_RESULT)
    assert isinstance(resumed, PollAgain)
    assert resumed.after == 0.05


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"retry_after_ms": 250}, {}, 0.25),
        ({"retry_after_ms": 2500.0}, {}, 2.5),
        ({"retry_after_ms": 10**9}, {}, 60.0),
        ({"retry_after_ms": 250, "queue_state": "paused_capacity"}, {}, 0.25),
        ({}, {"retry-after": "3"}, 3.0),
        ({}, {"retry-after-ms": "1"}, 0.05),
        ({"retry_after_ms": 0}, {}, 0.05),
        ({"retry_after_ms": -1}, {}, 0.05),
        ({"retry_after_ms": "soon"}, {}, 0.05),
        ({"retry_after_ms": True}, {}, 0.05),
        ({"retry_after_ms": None}, {}, 0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("status", "kind"), [(200, {"type": "try_again"}), (200, {"status": "pending"}), (408, {}), (503, {})]
)
def test_the_wait_that_a_server_requests_is_respected(
    status: int, kind: dict[str, Any], body: dict[str, Any], headers: dict[str, str], expected: float
) -> None:
    step = next_step(FRESH, reply({**kind, **body}, status=status, headers=headers), 0.001, JSON_RESULT)
    assert isinstance(step, PollAgain)
    assert step.after == expected


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
    rejection = reply({"detail": "bad"}, status=400)
    state = FRESH
    for _ in range(3):
        step = next_step(state, rejection, HELD, JSON_RESULT)
        assert isinstance(step, PollAgain)
        state = step.state
    failed = next_step(state, rejection, HELD, JSON_RESULT)
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
    ("body", "message", "category"),
    [
        ({"status": "failed", "error": {"message": "too long", "category": "user"}}, "too long", "User"),
        ({"status": "failed", "error": {"message": "too long"}, "category": "server"}, "too long", "Server"),
        ({"status": "failed", "error": "too long", "category": "user"}, "too long", "User"),
        ({"status": "failed", "error": {}}, "no reason", "Unknown"),
        ({"status": "failed"}, "no reason", "Unknown"),
        ({"error": {"message": "too long", "category": "user"}}, "too long", "User"),
    ],
    ids=str,
)
@pytest.mark.parametrize("polled", [JSON_RESULT, PROTO_RESULT], ids=["json", "proto"])
def test_a_failed_status_is_the_error_of_the_operation(
    polled: Polled, body: dict[str, Any], message: str, category: str
) -> None:
    step = next_step(FRESH, reply(body), 0.0, polled)
    assert isinstance(step, Failed)
    assert isinstance(step.error, RequestFailedError)
    assert message in step.error.message
    assert step.error.category is RequestErrorCategory[category]


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
        (reply({"status": "completed"}), JSON_RESULT),
        (reply({"status": "completed", "result": [1]}), JSON_RESULT),
        (reply({"status": "completed", "result": {}}), PROTO_RESULT),
        (reply({"status": "queued"}), JSON_RESULT),
        (reply({"status": "queued"}), PROTO_RESULT),
        (reply({"status": ["queued"]}), JSON_RESULT),
        (reply({"status": None, "metrics": {}}), JSON_RESULT),
        (reply({"status": 3, "metrics": {}}), JSON_RESULT),
    ],
)
def test_a_result_in_the_wrong_form_is_named(got: Reply, polled: Polled) -> None:
    step = next_step(FRESH, got, 0.0, polled)
    assert isinstance(step, Failed)
    assert isinstance(step.error, APIResponseValidationError)
    assert "req-1" in str(step.error)


# ---- the driver ----


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
    answers = [reply({"status": "complete_metadata", "response_payload_size": 10**6}), reply(body)] * 3
    fetcher, transport = results(lambda _: answers.pop(0))
    response = await fetcher.fetch(endpoint("asample"), ACCEPTED)
    assert (response.sequences[0].sequence_id, response.sequences[0].tokens) == ("seq-0", [1, 2])
    assert transport.requests[0].headers["accept"] == "application/x-protobuf"
    assert b'"allow_metadata_only":false' in transport.requests[1].body
    for _ in range(2):  # the bytes of a large result return to the budget
        async with asyncio.timeout(30):
            await fetcher.fetch(endpoint("asample"), ACCEPTED)


async def test_a_result_that_cannot_be_read_is_a_validation_error() -> None:
    fetcher, _ = results(lambda _: reply({"metrics": "many"}))
    with pytest.raises(APIResponseValidationError, match="req-1"):
        await fetcher.fetch(endpoint("optim_step"), ACCEPTED)


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("optim_step", {}, types.OptimStepResponse()),
        ("optim_step", {"metrics": None}, types.OptimStepResponse()),
        ("optim_step", {"type": "optim_step"}, types.OptimStepResponse()),
        ("optim_step", {"metrics": {"a": 1.0}, "news": 1}, types.OptimStepResponse(metrics={"a": 1.0})),
        (
            "save_weights",
            {"path": "tinker://r/weights/a"},
            types.SaveWeightsResponse(path="tinker://r/weights/a"),
        ),
        ("load_weights", {}, types.LoadWeightsResponse()),
        ("create_model", {"model_id": "m"}, types.CreateModelResponse(model_id="m")),
    ],
    ids=str,
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "completed"])
async def test_a_result_is_the_reply_or_the_field_of_a_completed_one(
    wrapped: bool, name: str, body: dict[str, Any], expected: Any
) -> None:
    answers = [
        reply({"status": "pending"}),
        reply({"status": "completed", "result": body} if wrapped else body),
    ]
    fetcher, _ = results(lambda _: answers.pop(0))
    assert await fetcher.fetch(endpoint(name), ACCEPTED) == expected


@pytest.mark.parametrize(
    ("name", "body", "shown"),
    [
        ("optim_step", {"place": 3}, ["'place'", "OptimStepResponse"]),
        ("optim_step", {"type": "queued"}, ["type 'queued'", "OptimStepResponse"]),
        ("optim_step", {"metrics": "many"}, ["'metrics'", "OptimStepResponse"]),
        ("optim_step", {"status": "queued", "place": 3}, ["status 'queued'", "'place'"]),
        ("save_weights", {}, ["an empty object", "SaveWeightsResponse", "path"]),
        ("save_weights", {"detail": "private words"}, ["'detail'", "SaveWeightsResponse"]),
        (
            "load_weights",
            {"type": "save_weights", "path": "p"},
            ["type 'save_weights'", "LoadWeightsResponse"],
        ),
        ("create_model", {"model": "m"}, ["'model'", "CreateModelResponse"]),
        ("create_model", {f"key_{n}": n for n in range(20)}, ["and 12 more"]),
    ],
    ids=str,
)
async def test_an_object_that_is_no_result_is_an_error_that_names_its_shape(
    name: str, body: dict[str, Any], shown: list[str]
) -> None:
    fetcher, _ = results(lambda _: reply(body))
    with pytest.raises(APIResponseValidationError, match="req-1") as caught:
        await fetcher.fetch(endpoint(name), ACCEPTED)
    for text in shown:
        assert text in str(caught.value)
    assert "private words" not in str(caught.value)


@pytest.mark.slow
async def test_queue_states_are_emitted_when_they_change() -> None:
    paused = reply({**PAUSED, "retry_after_ms": 1}, status=408)
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
    answers = [reply({**PAUSED, "retry_after_ms": 1}, status=408)] * 4 + [reply({"metrics": {}})]
    recorder = Recorder()
    fetcher, _ = results(lambda _: answers.pop(0), recorder, report_interval_s=0.0)
    await fetcher.fetch(endpoint("optim_step"), ACCEPTED)
    reported = [event for event in recorder.events if isinstance(event, StillWaiting)]
    assert [(e.request_id, e.request_type, e.state, e.reason) for e in reported] == [
        ("req-1", "OptimStep", "paused_capacity", "busy")
    ] * 4
    assert sorted(e.waited_s for e in reported) == [e.waited_s for e in reported]


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
    assert future.future().result() == 3
    assert future.done()

    async def main() -> tuple[int, int]:
        return await future, await future.result_async(timeout=60)

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
    assert future.result(timeout=60) == "done"


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
        future.result(timeout=60)


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
    assert gather(*futures).result(timeout=60) == [0.03, 0.0, 0.01]


def test_gathering_a_list_is_an_error_that_says_how_to_pass_it() -> None:
    done: AwaitableConcurrentFuture[int] = AwaitableConcurrentFuture()
    done.set_result(1)
    with pytest.raises(TypeError, match=r"got list; for a list write gather\(\*futures\)"):
        gather([done])  # type: ignore[arg-type]


def test_gathering_stops_at_the_first_error() -> None:
    async def forever() -> int:
        await asyncio.Event().wait()
        return 0

    async def fail() -> int:
        raise LookupError("gone")

    slow = AwaitableConcurrentFuture(background().submit(forever()))
    broken = AwaitableConcurrentFuture(background().submit(fail()))
    with pytest.raises(LookupError):
        gather(slow, broken).result(timeout=60)
    assert not slow.done()
    slow.cancel()
