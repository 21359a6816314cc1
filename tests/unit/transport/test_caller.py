"""Typed calls: headers, values, errors, events, and the end of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tinkex import types
from tinkex._transport.caller import PROTOCOL_VERSION, Caller, encode
from tinkex._transport.pauses import pauses_for
from tinkex._transport.retry import NO_RETRIES, RetryPolicy
from tinkex._transport.shared import SharedHttp
from tinkex._version import __version__
from tinkex._wire.endpoints import endpoint
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    AuthenticationError,
    ClosedError,
    NotFoundError,
)
from tinkex.observability.events import Event, RequestFinished, RequestStarted, RetryScheduled
from tinkex.testing import MockTransport, Reply, Request, reply

QUICK = RetryPolicy(base_s=0.001, cap_s=0.002)


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def caller(transport: MockTransport, sink: Recorder | None = None, **settings: object) -> Caller:
    config = Config(api_key="tml-test", base_url="http://mock", **settings)  # type: ignore[arg-type]
    return Caller(transport, config, sink=sink, policy=QUICK)


async def test_the_common_headers_are_those_of_the_protocol() -> None:
    transport = MockTransport(lambda _: reply({"session_id": "s"}))
    client = caller(
        transport,
        cloudflare_client_id="id",
        cloudflare_client_secret="hush",
        default_headers={"X-Team": "alpha"},
        default_query={"trace": "1"},
    )
    await client.call(endpoint("create_session"), types.CreateSessionRequest())
    request = transport.requests[0]
    assert request.headers["x-api-key"] == "tml-test"
    assert request.headers["user-agent"] == f"Tinkex/Python {__version__}"
    assert request.headers["x-stainless-package-version"] == PROTOCOL_VERSION == "0.36.0"
    assert request.headers["accept"] == request.headers["content-type"] == "application/json"
    assert request.headers["cf-access-client-id"] == "id"
    assert request.headers["cf-access-client-secret"] == "hush"
    assert request.headers["x-team"] == "alpha"
    assert request.query == {"trace": "1"}
    assert (request.purpose, request.timeout) == ("session", 60.0)


async def test_reading_has_neither_content_type_nor_idempotency_key() -> None:
    transport = MockTransport(lambda _: reply({"sessions": []}))
    query = {"limit": 5, "public": True, "project_id": None}
    await caller(transport).call(endpoint("list_sessions"), query=query)
    request = transport.requests[0]
    assert not {"content-type", "x-idempotency-key"} & set(request.headers)
    assert request.query == {"limit": "5", "public": "true"}
    assert request.body == b""


async def test_all_tries_of_a_call_share_one_idempotency_key() -> None:
    replies = [reply(status=503), reply(status=503), reply({"session_id": "s"}), reply({"session_id": "s"})]
    transport = MockTransport(lambda _: replies.pop(0))
    client = caller(transport)
    for _ in range(2):
        await client.call(endpoint("create_session"), types.CreateSessionRequest())
    keys = [request.headers["x-idempotency-key"] for request in transport.requests]
    assert keys[0] == keys[1] == keys[2] != keys[3]


async def test_values_go_out_without_nones_except_where_null_is_meant() -> None:
    finish = types.FinishSessionRequest(reason=types.FinishReason(type="success"))
    assert encode(endpoint("finish_session"), finish) == b'{"reason":{"type":"success"},"detail":null}'
    assert b"project_id" not in encode(endpoint("create_session"), types.CreateSessionRequest())
    assert encode(endpoint("healthz"), None) == b""


async def test_a_training_pass_goes_out_as_protobuf() -> None:
    transport = MockTransport(lambda _: reply({"request_id": "r"}))
    datum = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    request = types.ForwardBackwardRequest("m", 1, [datum], "cross_entropy")
    await caller(transport).call(endpoint("forward_backward"), request)
    assert transport.requests[0].headers["content-type"] == "application/x-protobuf"
    assert transport.requests[0].body == encode(endpoint("forward_backward"), request)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"id": 1}'])
async def test_a_reply_that_does_not_follow_the_protocol_is_named(body: bytes) -> None:
    transport = MockTransport(lambda _: Reply(200, {}, body))
    with pytest.raises(APIResponseValidationError, match="create_session"):
        await caller(transport).call(endpoint("create_session"), types.CreateSessionRequest())
    assert len(transport.requests) == 1


async def test_statuses_become_typed_errors_with_their_request() -> None:
    transport = MockTransport(lambda _: reply({"detail": "who are you?"}, status=401))
    with pytest.raises(AuthenticationError, match="who are you") as caught:
        await caller(transport).call(endpoint("get_session"), path={"session_id": "s:1"})
    assert caught.value.status_code == 401
    assert caught.value.body == {"detail": "who are you?"}
    assert caught.value.request is not None
    assert caught.value.request.url == "http://mock/api/v1/sessions/s:1"
    assert "tml-test" not in repr(caught.value.__dict__)


async def test_an_error_page_that_is_not_json_is_shown_as_text() -> None:
    transport = MockTransport(lambda _: Reply(404, {}, b"<h1>nothing here</h1>"))
    with pytest.raises(NotFoundError, match="nothing here"):
        await caller(transport).call(endpoint("healthz"))


@pytest.mark.slow
async def test_a_429_pauses_all_calls_of_its_purpose_and_no_others() -> None:
    rejected_at: list[float] = []
    went_out: list[float] = []
    reported = asyncio.Event()

    def handler(request: Request) -> Reply:
        if request.purpose == "rest" and not rejected_at:
            rejected_at.append(time.monotonic())
            reported.set()
            return reply({"detail": "slow down"}, status=429, headers={"retry-after-ms": "200"})
        if request.purpose == "rest":
            went_out.append(time.monotonic())
        return reply({"status": "ok", "session_id": "s"})

    transport = MockTransport(handler)
    client = caller(transport)
    first = asyncio.ensure_future(client.call(endpoint("healthz")))
    await reported.wait()
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(client.call(endpoint("healthz"))) for _ in range(5)]
    await client.call(endpoint("create_session"), types.CreateSessionRequest())
    await asyncio.gather(first, *others)
    assert len(went_out) == 6
    assert min(went_out) >= rejected_at[0] + 0.2


def test_clients_of_one_server_and_key_hold_back_together() -> None:
    def config(**more: Any) -> Config:
        return Config(**{"base_url": "http://host:1", "api_key": "tml-x", **more})

    one, same, key, host = (
        pauses_for(SharedHttp(each), each)
        for each in (config(), config(), config(api_key="tml-y"), config(base_url="http://other:1"))
    )
    assert one is same
    assert len({id(each) for each in (one, key, host)}) == 3


async def test_events_contain_no_secrets() -> None:
    replies: list[Reply | Exception] = [
        APIConnectionError(None, "cable cut"),
        reply(status=503),
        reply({"status": "ok"}),
    ]

    def handler(_: Request) -> Reply:
        answer = replies.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    recorder = Recorder()
    await caller(MockTransport(handler), recorder).call(endpoint("healthz"))
    kinds = [type(event) for event in recorder.events]
    once = [RequestStarted, RequestFinished]
    assert kinds == [*once, RetryScheduled, *once, RetryScheduled, *once]
    finished = [event for event in recorder.events if isinstance(event, RequestFinished)]
    assert [(event.status, event.error) for event in finished] == [
        (None, "cable cut"),
        (503, None),
        (200, None),
    ]
    assert "tml-test" not in repr(recorder.events)


async def test_a_single_attempt_returns_whatever_came() -> None:
    transport = MockTransport(lambda _: reply({"detail": "later"}, status=429))
    assert (await caller(transport).attempt(endpoint("healthz"))).status == 429
    empty = MockTransport(lambda _: reply(status=400))
    with pytest.raises(APIConnectionError):
        await caller(empty).exchange(endpoint("healthz"), policy=NO_RETRIES)


async def test_calls_in_flight_raise_a_closed_error_when_the_client_is_closed() -> None:
    sent = asyncio.Event()

    async def never(_: Request) -> Reply:
        sent.set()
        await asyncio.Event().wait()
        raise AssertionError

    transport = MockTransport(never)
    client = caller(transport)
    call = asyncio.ensure_future(client.call(endpoint("healthz")))
    await sent.wait()
    await client.close()
    with pytest.raises(ClosedError, match="healthz"):
        await call
    with pytest.raises(ClosedError, match="healthz"):
        await client.call(endpoint("healthz"))
    assert transport.closed
    assert len(transport.requests) == 1


async def test_cancelling_a_call_is_a_cancellation() -> None:
    sent = asyncio.Event()

    async def never(_: Request) -> Reply:
        sent.set()
        await asyncio.Event().wait()
        raise AssertionError

    call = asyncio.ensure_future(caller(MockTransport(never)).call(endpoint("healthz")))
    await sent.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_refused_connection_is_retried_briefly_before_the_first_reply_and_as_usual_after_it() -> None:
    outcomes: list[str] = []

    def handler(_: Request) -> Reply:
        if outcomes.pop(0) == "refused":
            raise APIConnectionError(None, "no reply") from ConnectionRefusedError()
        return reply({"status": "ok"})

    transport = MockTransport(handler)
    config = Config(api_key="tml-test", base_url="http://mock")
    client = Caller(transport, config, policy=RetryPolicy(base_s=0.001, cap_s=0.002, first_contact_s=0.0))
    outcomes += ["refused"]
    with pytest.raises(APIConnectionError) as raised:
        await client.call(endpoint("healthz"))
    assert "check base_url" in raised.value.__notes__[0]
    outcomes += ["ok", *["refused"] * 7, "ok"]
    await client.call(endpoint("healthz"))
    await client.call(endpoint("healthz"))
    assert len(transport.requests) == 10


async def test_nothing_listens_is_recognised_on_a_real_socket() -> None:
    recorder = Recorder()
    config = Config(api_key="tml-test", base_url="http://127.0.0.1:9")
    shared = SharedHttp(config)
    client = Caller(shared, config, sink=recorder, policy=RetryPolicy(base_s=0.001, first_contact_s=0.0))
    with pytest.raises(APIConnectionError, match="connection refused") as raised:
        await client.call(endpoint("healthz"))
    await client.close()
    assert raised.value.__notes__
    assert sum(isinstance(event, RequestStarted) for event in recorder.events) == 1
