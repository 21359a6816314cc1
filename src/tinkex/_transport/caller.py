"""A typed call: a row of the endpoint table and a value go in, the row's response value comes out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinkex._transport.advice import advice
from tinkex._transport.base import Reply, Request, Transport, Upload
from tinkex._transport.called_stream import CalledStream
from tinkex._transport.circuit import Circuit, Passage, circuit_of
from tinkex._transport.pauses import pauses_for
from tinkex._transport.retry import Answered, Outcome, Retry, RetryPolicy, Unanswered, decide
from tinkex._transport.streaming import open_stream, send_upload
from tinkex._transport.traced import traced
from tinkex._version import __version__
from tinkex._wire import json
from tinkex.config import mask
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    ClosedError,
    ConfigError,
    HttpRequest,
    HttpResponse,
    RateLimitError,
    status_error,
)
from tinkex.observability import tracing
from tinkex.observability.bus import EventBus
from tinkex.observability.events import RequestFinished, RequestStarted, RetryScheduled

if TYPE_CHECKING:
    from tinkex._transport.credentials import Tokens
    from tinkex._wire.endpoints import Endpoint
    from tinkex.config import Config
    from tinkex.observability.events import Sink

__all__ = [
    "EVENT_STREAM",
    "PROTOBUF",
    "PROTOCOL_VERSION",
    "Caller",
    "encode",
    "error_of",
    "is_proxy_refusal",
    "shown_headers",
]

PROTOCOL_VERSION = "0.36.0"
"""The version of the official client whose protocol we speak; servers read it to know what we understand."""

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"
LONGEST_REFUSAL = 1024 * 1024

SHORTEST_SECRET = 8
"""Shorter texts are left alone where a reply quotes them: they would be found in every other word."""

_EXPLICIT_NULL = frozenset({"finish_session"})
"""Calls whose absent values travel as ``null`` instead of being left out."""


class Caller:
    """Makes calls over a transport: headers, retries, and typed values and errors.

    >>> from tinkex.config import Config
    >>> from tinkex.testing import MockTransport, reply
    >>> caller = Caller(MockTransport(lambda request: reply({"status": "ok"})), Config())
    >>> from tinkex._runtime import background
    >>> from tinkex._wire.endpoints import endpoint
    >>> background().run(caller.call(endpoint("healthz"))).status
    'ok'
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        *,
        sink: Sink | None = None,
        policy: RetryPolicy | None = None,
        dice: Callable[[], float] = random.random,
        circuit: Circuit | None = None,
    ) -> None:
        self.config = config
        self.transport = transport
        self.sink = EventBus() if sink is None else EventBus(sink)
        """Where every event of this client is emitted; metrics, telemetry and the log subscribe."""
        self._circuit = circuit or circuit_of(transport, config, self.sink)
        self._pauses = pauses_for(transport, config)
        self.policy = policy or RetryPolicy(max_retries=config.max_retries)
        self._dice = dice
        common = _common_headers(config)
        self._headers = {
            wire: {**common, "content-type": kind} for wire, kind in (("json", JSON), ("proto", PROTOBUF))
        }
        self._headers_without_body = common
        # Keys need to be different, not secret: a random beginning per caller and a number per call.
        self._key, self._calls = secrets.token_hex(8), itertools.count()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = asyncio.Event()
        self.streams: weakref.WeakSet[CalledStream] = weakref.WeakSet()
        """The replies that are being read while they arrive."""
        self.tokens: Tokens | None = None
        """Where the server hands out short-lived tokens: these go out instead of the key."""

    async def call(
        self,
        row: Endpoint,
        value: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        policy: RetryPolicy | None = None,
        upload: Upload | None = None,
    ) -> Any:
        """Makes the call and returns a value of ``row.response`` (None where the row has none).

        ``value`` is a value of ``row.request``, or the bytes :func:`encode` made of one. An ``upload`` is sent
        in its place.
        """
        reply = await self.exchange(
            row, value, path=path, query=query, headers=headers, timeout=timeout, policy=policy, upload=upload
        )
        if row.response is None:
            return None
        try:
            return json.decode(reply.body, row.response)
        except json.Malformed as error:
            raise APIResponseValidationError(
                _response(reply, self.about(row, path)),
                reply.body,
                f"the answer to {row.name} does not follow the protocol: {error}",
            ) from error

    async def exchange(
        self,
        row: Endpoint,
        value: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        policy: RetryPolicy | None = None,
        upload: Upload | None = None,
    ) -> Reply:
        """Makes the call with retries and returns the raw reply; an error status is raised as its typed error."""
        policy = policy or self.policy
        request = self._request(row, value, path=path, query=query, headers=headers, timeout=timeout)
        if upload is not None:
            sent = {**request.headers, "content-type": upload.content_type, "accept-encoding": "identity"}
            request = replace(request, headers=sent, upload=upload)
        began = time.monotonic()
        attempt = 0
        while True:
            outcome: Outcome
            error: APIConnectionError | APIStatusError
            if self._pauses.left(row.purpose):
                async with self.closable(row):
                    await self._pauses.wait(row.purpose)
            try:
                reply = await self._send(row, request, attempt)
            except APIConnectionError as unanswered:
                outcome, error = Unanswered(), unanswered
            else:
                if 200 <= reply.status < 300:
                    return reply
                outcome, error = self._refused(row, reply, self.about(row, path))
            step = decide(outcome, attempt, time.monotonic() - began, policy, self._dice)
            if not isinstance(step, Retry):
                raise error
            if upload is not None and not upload.repeatable:
                error.add_note(
                    "It was not tried again: a file object that cannot be rewound was read already."
                )
                raise error
            self.sink.emit(RetryScheduled(row.name, attempt, step.after, error.message))
            if isinstance(error, RateLimitError):
                self._pauses.push_back(row.purpose, step.after)
            async with self.closable(row):
                await asyncio.sleep(step.after)
            attempt += 1

    async def attempt(
        self,
        row: Endpoint,
        value: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Sends the call once and returns the reply whatever its status, for callers with their own loop."""
        return await self._send(row, self._request(row, value, headers=headers, timeout=timeout), 0)

    async def stream(
        self,
        row: Endpoint,
        value: Any,
        *,
        headers: Mapping[str, str] | None = None,
        attempt: int = 0,
    ) -> CalledStream:
        """Sends the call once and returns as soon as the reply begins; an error status is raised as its typed error."""
        wanted = {"accept": EVENT_STREAM, "accept-encoding": "identity", **(headers or {})}
        request = self._request(row, value, headers=wanted)
        request = await self._with_credentials(row, request, attempt)
        operation = tracing.current()
        if operation is None:
            return await self._stream_now(row, request, attempt)
        return await traced(operation, self._stream_now, row, request, attempt, self.config.base_url)

    async def _stream_now(self, row: Endpoint, request: Request, attempt: int) -> CalledStream:
        passage = self._circuit.enter(row, self.about(row)) if self._circuit else None
        began = time.monotonic()
        opened = CalledStream(self, row)
        try:
            self.sink.emit(RequestStarted(row.name, attempt))
            async with self.closable(row):
                stream = await open_stream(self.transport, request)
                if passage:
                    passage.answered(stream.status)
        except APIConnectionError as error:
            self._note_silence(row, attempt, began, error, passage)
            raise
        finally:
            if passage:
                passage.over()
        self.sink.emit(RequestFinished(row.name, attempt, stream.status, time.monotonic() - began))
        opened.carry(stream)
        if 200 <= stream.status < 300:
            return opened
        try:
            body = bytearray()
            while len(body) < LONGEST_REFUSAL and (piece := await opened.read()):
                body += piece
        finally:
            await opened.close()
        reply = _without_secrets(Reply(stream.status, stream.headers, bytes(body)), request)
        raise self._refused(row, reply, self.about(row))[1]

    @contextlib.asynccontextmanager
    async def closable(self, row: Endpoint) -> AsyncIterator[None]:
        """Has the block end with ``ClosedError`` when the client is closed."""
        if self._closed.is_set():
            raise ClosedError(f"{row.name} was not sent: the client is closed")
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._closed.is_set():
                raise
            task.uncancel()  # close() cancelled the request, not the task that waits for it
            raise ClosedError(f"{row.name} was under way when the client was closed") from None
        finally:
            self._under_way.discard(task)

    async def close(self) -> None:
        """Ends every call under way with ``ClosedError`` and closes the transport."""
        self._closed.set()
        for task in list(self._under_way):
            task.cancel()
        for stream in list(self.streams):
            await stream.close()
        await self.transport.close()

    def _refused(
        self, row: Endpoint, reply: Reply, about: HttpRequest
    ) -> tuple[Outcome, APIConnectionError | APIStatusError]:
        if is_proxy_refusal(reply):
            message = f"something on the way to {self.config.base_url} refused {row.name} with an empty 400"
            return Unanswered(), APIConnectionError(about, message)
        return Answered(reply.status, reply.headers), error_of(reply, about)

    async def _with_credentials(self, row: Endpoint, request: Request, attempt: int) -> Request:
        if self.tokens is not None and row.name != "auth_token":
            key = await self.tokens.current()
            request = replace(request, headers={**request.headers, "x-api-key": key})
        if attempt:
            counted = {**request.headers, "x-stainless-retry-count": str(attempt)}
            request = replace(request, headers=counted)
        return request

    async def _send(self, row: Endpoint, request: Request, attempt: int) -> Reply:
        sent = await self._with_credentials(row, request, attempt)
        reply = await self._send_watched(row, sent, attempt)
        if reply.status == 401 and self.tokens is not None and row.name != "auth_token":
            again = await self._with_another_token(row, sent, attempt)
            if again is not None:
                return await self._send_watched(row, again, attempt)
        return reply

    async def _with_another_token(self, row: Endpoint, sent: Request, attempt: int) -> Request | None:
        """The request with a new token, for a server that has forgotten whom it gave the old one; None without one."""
        assert self.tokens is not None
        if sent.upload is not None and not sent.upload.repeatable:
            return None
        self.tokens.refused(sent.headers["x-api-key"])
        try:
            again = await self._with_credentials(row, sent, attempt)
        except (APIError, ConfigError):
            return None  # the refusal itself says it best
        return again if again.headers["x-api-key"] != sent.headers["x-api-key"] else None

    async def _send_watched(self, row: Endpoint, request: Request, attempt: int) -> Reply:
        operation = tracing.current()
        if operation is None:
            return await self._send_now(row, request, attempt)
        return await traced(operation, self._send_now, row, request, attempt, self.config.base_url)

    async def _send_now(self, row: Endpoint, request: Request, attempt: int) -> Reply:
        if self._closed.is_set():
            raise ClosedError(f"{row.name} was not sent: the client is closed")
        task = asyncio.current_task()
        assert task is not None
        passage = (
            self._circuit.enter(row, HttpRequest(request.method, self.config.base_url + request.path))
            if self._circuit
            else None
        )
        began = time.monotonic()
        self._under_way.add(task)
        try:
            self.sink.emit(RequestStarted(row.name, attempt))
            if self.config.dump_headers:
                logging.getLogger("tinkex").info(
                    "%s %s try %d %s", request.method, request.path, attempt, shown_headers(request.headers)
                )
            if request.upload is None:
                reply = await self.transport.send(request)
            else:
                reply = await send_upload(self.transport, request)
            if passage:
                passage.answered(reply.status)
        except APIConnectionError as error:
            self._note_silence(row, attempt, began, error, passage)
            raise
        except asyncio.CancelledError:
            if not self._closed.is_set():
                raise
            task.uncancel()  # close() cancelled the request, not the task that waits for it
            raise ClosedError(f"{row.name} was under way when the client was closed") from None
        finally:
            self._under_way.discard(task)
            if passage:
                passage.over()
        self.sink.emit(RequestFinished(row.name, attempt, reply.status, time.monotonic() - began))
        return reply if 200 <= reply.status < 300 else _without_secrets(reply, request)

    def _request(
        self,
        row: Endpoint,
        value: Any,
        *,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Request:
        if row.method == "GET":
            sent = self._headers_without_body.copy()
        else:
            sent = self._headers["proto" if row.request_wire == "proto" else "json"].copy()
            sent["x-idempotency-key"] = f"{self._key}-{next(self._calls)}"
        if headers:
            sent.update(headers)
        asked = self.config.default_query
        if query:
            given = {name: _query_text(item) for name, item in query.items() if item is not None}
            asked = {**asked, **given}
        return Request(
            row.method,
            row.url_path(path) if path else row.path,
            sent,
            value if isinstance(value, bytes) else encode(row, value),
            asked,
            row.purpose,
            timeout or self.config.timeout,
        )

    def _note_silence(
        self, row: Endpoint, attempt: int, began: float, error: APIConnectionError, passage: Passage | None
    ) -> None:
        """Tells the sink and the circuit that a request got no answer."""
        self.sink.emit(RequestFinished(row.name, attempt, None, time.monotonic() - began, error.message))
        if passage:
            passage.unanswered(error.message)

    def about(self, row: Endpoint, path: Mapping[str, str] | None = None) -> HttpRequest:
        """The request as errors show it."""
        return HttpRequest(row.method, self.config.base_url + row.url_path(path))


def encode(row: Endpoint, value: Any) -> bytes:
    """The body of a call: JSON or protobuf as the row says, nothing for None."""
    if value is None:
        return b""
    if row.request_wire == "proto":
        from tinkex._wire import proto

        return proto.encode_forward_backward(value)
    return json.encode(value, omit_none=row.name not in _EXPLICIT_NULL)


def is_proxy_refusal(reply: Reply) -> bool:
    """Whether a 400 came from something on the way: servers say what was wrong, proxies send nothing."""
    return reply.status == 400 and not reply.body


def error_of(reply: Reply, about: HttpRequest) -> APIStatusError:
    """The typed error for a reply with an error status."""
    response = _response(reply, about)
    if 300 <= reply.status < 400:
        elsewhere = reply.headers.get("location", "another address")
        return APIStatusError(f"{about.url} redirects to {elsewhere}; use that server as base_url", response)
    try:
        body: object | None = json.decode_any(reply.body) if reply.body else None
    except json.Malformed:
        body = None
    plain = status_error(response, body)
    return type(plain)(f"{plain.message} (from {about.url}). {advice(reply.status)}".strip(), response, body)


def _without_secrets(reply: Reply, request: Request) -> Reply:
    """The reply without what was secret in the request: some servers and proxies quote what they refuse."""
    sent = [value for name, value in request.headers.items() if not name.startswith(_HARMLESS)]
    body, headers = reply.body, dict(reply.headers)
    for value in [*sent, *request.query.values()]:
        for secret in {value, value.rpartition(" ")[2]}:  # also the key of "Bearer key"
            if len(secret) >= SHORTEST_SECRET:
                body = body.replace(secret.encode(), mask(secret).encode())
                headers = {name: text.replace(secret, mask(secret)) for name, text in headers.items()}
    return replace(reply, body=body, headers=headers)


def shown_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers as they may be written down: only those that never hold a secret say what they hold.

    >>> shown_headers({"accept": "application/json", "x-api-key": "tml-secret"})
    {'accept': 'application/json', 'x-api-key': '…'}
    """
    return {name: value if name.lower().startswith(_HARMLESS) else "…" for name, value in headers.items()}


_HARMLESS = (
    "accept",
    "content-",
    "traceparent",
    "user-agent",
    "x-idempotency-key",
    "x-sdk-",
    "x-stainless-",
    "x-tinker-create-promise",
    "x-tinker-request-",
    "x-tinker-sampling-",
)


def _response(reply: Reply, about: HttpRequest) -> HttpResponse:
    return HttpResponse(reply.status, reply.headers, reply.body.decode("utf-8", "replace"), about)


def _query_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _common_headers(config: Config) -> dict[str, str]:
    headers = {
        "accept": JSON,
        "user-agent": f"Tinkex/Python {__version__}",
        "x-stainless-package-version": PROTOCOL_VERSION,
        "x-stainless-retry-count": "0",
    }
    if config.api_key:
        headers["x-api-key"] = config.api_key
    if config.cloudflare_client_id:
        headers["cf-access-client-id"] = config.cloudflare_client_id
    if config.cloudflare_client_secret:
        headers["cf-access-client-secret"] = config.cloudflare_client_secret
    headers.update({name.lower(): value for name, value in config.default_headers.items()})
    return headers
