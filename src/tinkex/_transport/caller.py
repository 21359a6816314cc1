"""Typed calls: an entry of the endpoint table and a request value go in, a response value or a typed error comes out."""

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
from tinkex._transport.call_stream import CallStream
from tinkex._transport.circuit import Circuit, GuardedCall, circuit_of
from tinkex._transport.headers import (
    EVENT_STREAM,
    JSON,
    PROTOBUF,
    PROTOCOL_VERSION,
    RETRY_COUNT,
    USER_AGENT,
    common_headers,
)
from tinkex._transport.pauses import pauses_for
from tinkex._transport.redaction import redacted_headers, without_secrets
from tinkex._transport.request_spans import traced
from tinkex._transport.retry import ErrorStatus, NoReply, Outcome, Retry, RetryPolicy, decide, without_reply
from tinkex._transport.streaming import open_stream, send_upload
from tinkex._wire import json
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
from tinkex.observability.callbacks import CallbackQueue, queue_for
from tinkex.observability.events import RequestFinished, RequestStarted, RetryScheduled
from tinkex.observability.process import BUS

if TYPE_CHECKING:
    from tinkex._transport.credentials import CommandCredential, TokenProvider
    from tinkex._wire.endpoints import Endpoint
    from tinkex.config import Config
    from tinkex.observability.events import Sink

__all__ = [
    "EVENT_STREAM",
    "PROTOBUF",
    "PROTOCOL_VERSION",
    "USER_AGENT",
    "Caller",
    "encode",
    "error_of",
    "is_proxy_error",
]

MAX_ERROR_BODY_BYTES = 1024 * 1024

_EXPLICIT_NULL = frozenset({"finish_session"})
"""Calls that send absent values as ``null`` instead of leaving them out."""


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
        rng: Callable[[], float] = random.random,
        circuit: Circuit | None = None,
    ) -> None:
        self.config = config
        self.transport = transport
        self.sink = EventBus(BUS) if sink is None else EventBus(sink, BUS)
        """Where every event of this client is emitted; metrics, telemetry and the log subscribe."""
        self.callbacks = queue_for(sink)
        """Calls the user's queue observers, in order with the user's sink."""
        self.done_callbacks = CallbackQueue()
        """Calls what users add to futures; not in order with the sink, so that it may wait for calls of other clients."""
        self._circuit = circuit or circuit_of(transport, config, self.sink)
        self._pauses = pauses_for(transport, config)
        self.policy = policy or RetryPolicy(max_retries=config.max_retries)
        self._rng = rng
        common = common_headers(config)
        self._headers = {
            wire: {**common, "content-type": kind} for wire, kind in (("json", JSON), ("proto", PROTOBUF))
        }
        self._headers_without_body = common
        # Keys must be unique, not secret: a random prefix per caller and a number per call.
        self._key, self._calls = secrets.token_hex(8), itertools.count()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._contacted = False
        self._closed = asyncio.Event()
        self.streams: weakref.WeakSet[CallStream] = weakref.WeakSet()
        """The open streams."""
        self.tokens: TokenProvider | None = None
        """Provides short-lived tokens, sent instead of the key; None where the server issues none."""
        self._command: CommandCredential | None = None
        if config.api_key is None and config.credential_cmd is not None:
            from tinkex._transport.credentials import CommandCredential

            self._command = CommandCredential(config.credential_cmd)

    async def call(
        self,
        endpoint: Endpoint,
        value: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        policy: RetryPolicy | None = None,
        upload: Upload | None = None,
    ) -> Any:
        """Makes the call and returns a value of ``endpoint.response`` (None where that is None).

        ``value`` is a value of ``endpoint.request``, or the bytes that :func:`encode` returns for one. An ``upload``
        is sent instead of it.
        """
        reply = await self.exchange(
            endpoint,
            value,
            path=path,
            query=query,
            headers=headers,
            timeout=timeout,
            policy=policy,
            upload=upload,
        )
        if endpoint.response is None:
            return None
        try:
            return json.decode(reply.body, endpoint.response)
        except json.Malformed as error:
            raise APIResponseValidationError(
                _response(reply, self.about(endpoint, path)),
                reply.body,
                f"the reply to {endpoint.name} does not follow the protocol: {error}",
            ) from error

    async def exchange(
        self,
        endpoint: Endpoint,
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
        request = self._request(endpoint, value, path=path, query=query, headers=headers, timeout=timeout)
        if upload is not None:
            sent = {**request.headers, "content-type": upload.content_type, "accept-encoding": "identity"}
            request = replace(request, headers=sent, upload=upload)
        return await self.send(endpoint, request, policy)

    async def send(self, endpoint: Endpoint, request: Request, policy: RetryPolicy | None = None) -> Reply:
        """Sends a request with retries and returns the raw reply; an error status is raised as its typed error."""
        policy = policy or self.policy
        began = time.monotonic()
        attempt = 0
        while True:
            outcome: Outcome
            error: APIConnectionError | APIStatusError
            if self._pauses.remaining_s(endpoint.purpose):
                async with self.closable(endpoint):
                    await self._pauses.wait(endpoint.purpose)
            try:
                reply = await self._attempt(endpoint, request, attempt)
            except APIConnectionError as no_reply:
                outcome, error = without_reply(no_reply, contacted=self._contacted), no_reply
            else:
                if 200 <= reply.status < 300:
                    return reply
                outcome, error = self._failure(endpoint, reply, request)
            step = decide(outcome, attempt, time.monotonic() - began, policy, self._rng)
            if not isinstance(step, Retry):
                raise error
            if request.upload is not None and not request.upload.repeatable:
                error.add_note("It was not retried: a file object that cannot be rewound was already read.")
                raise error
            self.sink.emit(RetryScheduled(endpoint.name, attempt, step.after, error.message))
            if isinstance(error, RateLimitError):
                self._pauses.extend(endpoint.purpose, step.after)
            async with self.closable(endpoint):
                await asyncio.sleep(step.after)
            attempt += 1

    async def attempt(
        self,
        endpoint: Endpoint,
        value: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Sends the call once and returns the reply whatever its status, for callers with a retry loop of their own."""
        return await self._attempt(
            endpoint, self._request(endpoint, value, headers=headers, timeout=timeout), 0
        )

    async def stream(
        self,
        endpoint: Endpoint,
        value: Any,
        *,
        headers: Mapping[str, str] | None = None,
        attempt: int = 0,
    ) -> CallStream:
        """Sends the call once and returns its server-sent events while they arrive; see :meth:`open_stream`."""
        accepted = {"accept": EVENT_STREAM, "accept-encoding": "identity", **(headers or {})}
        return await self.open_stream(endpoint, self._request(endpoint, value, headers=accepted), attempt)

    async def open_stream(self, endpoint: Endpoint, request: Request, attempt: int = 0) -> CallStream:
        """Sends a request once and returns its response while that arrives; an error status is raised as its typed error."""
        request = await self._with_credentials(endpoint, request, attempt)
        operation = tracing.current()
        if operation is None:
            return await self._stream_once(endpoint, request, attempt)
        return await traced(operation, self._stream_once, endpoint, request, attempt, self.config.base_url)

    async def _stream_once(self, endpoint: Endpoint, request: Request, attempt: int) -> CallStream:
        guard = self._circuit.enter(endpoint, request.about(self.config.base_url)) if self._circuit else None
        began = time.monotonic()
        try:
            self.sink.emit(RequestStarted(endpoint.name, attempt))
            self._log(request, attempt)
            async with self.closable(endpoint):
                opened = await open_stream(self.transport, request)
                self._contacted = True
                if guard:
                    guard.replied(opened.status, opened.headers)
        except APIConnectionError as error:
            self._record_failure(endpoint, attempt, began, error, guard)
            raise
        finally:
            if guard:
                guard.end()
        self.sink.emit(RequestFinished(endpoint.name, attempt, opened.status, time.monotonic() - began))
        stream = CallStream(self, endpoint, opened)
        if 200 <= stream.status < 300:
            return stream
        try:
            body = bytearray()
            with contextlib.suppress(TimeoutError):  # what has arrived until then describes the error
                async with asyncio.timeout(request.timeout):
                    while len(body) < MAX_ERROR_BODY_BYTES and (chunk := await stream.read()):
                        body += chunk
        finally:
            await stream.close()
        reply = without_secrets(
            Reply(stream.status, stream.headers, bytes(body)), request, self.config.default_query
        )
        raise self._failure(endpoint, reply, request)[1]

    @contextlib.asynccontextmanager
    async def closable(self, endpoint: Endpoint) -> AsyncIterator[None]:
        """Makes the block raise ``ClosedError`` when the client is closed."""
        if self._closed.is_set():
            raise ClosedError(f"{endpoint.name} was not sent: the client is closed")
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._closed.is_set():
                raise
            task.uncancel()  # close() cancelled the request, not the task that waits for it
            raise ClosedError(f"the client was closed while {endpoint.name} was in flight") from None
        finally:
            self._in_flight.discard(task)

    @property
    def closed(self) -> bool:
        """Whether the client is closed."""
        return self._closed.is_set()

    async def close(self) -> None:
        """Makes every call in flight raise ``ClosedError``, and closes the transport."""
        self._closed.set()
        for task in list(self._in_flight):
            task.cancel()
        for stream in list(self.streams):
            await stream.close()
        await self.transport.close()

    def _failure(
        self, endpoint: Endpoint, reply: Reply, request: Request
    ) -> tuple[Outcome, APIConnectionError | APIStatusError]:
        about = request.about(self.config.base_url)
        if is_proxy_error(reply):
            message = f"a proxy in front of {self.config.base_url} rejected {endpoint.name} with an empty 400"
            return NoReply(), APIConnectionError(about, message)
        error = error_of(reply, about, signed_url=endpoint.purpose == "download")
        return ErrorStatus(reply.status, reply.headers), error

    async def _with_credentials(self, endpoint: Endpoint, request: Request, attempt: int) -> Request:
        provider = self.tokens or self._command
        if provider is not None and endpoint.name != "auth_token":
            key = await provider.current()
            request = replace(request, headers={**request.headers, "x-api-key": key})
        if attempt and RETRY_COUNT in request.headers:
            request = replace(request, headers={**request.headers, RETRY_COUNT: str(attempt)})
        return request

    async def _attempt(self, endpoint: Endpoint, request: Request, attempt: int) -> Reply:
        sent = await self._with_credentials(endpoint, request, attempt)
        reply = await self._attempt_traced(endpoint, sent, attempt)
        if reply.status == 401 and endpoint.name != "auth_token":
            again = await self._with_another_token(endpoint, sent, attempt)
            if again is not None:
                return await self._attempt_traced(endpoint, again, attempt)
        return reply

    async def _with_another_token(self, endpoint: Endpoint, sent: Request, attempt: int) -> Request | None:
        """The request with a new token, for a server that no longer accepts the old one; None if there is no new one."""
        provider = self.tokens or self._command
        if provider is None:
            return None
        if sent.upload is not None and not sent.upload.repeatable:
            return None
        provider.invalidate(sent.headers["x-api-key"])
        try:
            again = await self._with_credentials(endpoint, sent, attempt)
        except (APIError, ConfigError):
            return None  # the 401 is raised
        return again if again.headers["x-api-key"] != sent.headers["x-api-key"] else None

    async def _attempt_traced(self, endpoint: Endpoint, request: Request, attempt: int) -> Reply:
        operation = tracing.current()
        if operation is None:
            return await self._send_once(endpoint, request, attempt)
        return await traced(operation, self._send_once, endpoint, request, attempt, self.config.base_url)

    async def _send_once(self, endpoint: Endpoint, request: Request, attempt: int) -> Reply:
        if self._closed.is_set():
            raise ClosedError(f"{endpoint.name} was not sent: the client is closed")
        task = asyncio.current_task()
        assert task is not None
        guard = self._circuit.enter(endpoint, request.about(self.config.base_url)) if self._circuit else None
        began = time.monotonic()
        self._in_flight.add(task)
        try:
            self.sink.emit(RequestStarted(endpoint.name, attempt))
            self._log(request, attempt)
            if request.upload is None:
                reply = await self.transport.send(request)
            else:
                reply = await send_upload(self.transport, request)
            self._contacted = True
            if guard:
                guard.replied(reply.status, reply.headers)
        except (APIConnectionError, APIResponseValidationError) as error:
            self._record_failure(endpoint, attempt, began, error, guard)
            raise
        except asyncio.CancelledError:
            if not self._closed.is_set():
                raise
            task.uncancel()  # close() cancelled the request, not the task that waits for it
            raise ClosedError(f"the client was closed while {endpoint.name} was in flight") from None
        finally:
            self._in_flight.discard(task)
            if guard:
                guard.end()
        self.sink.emit(RequestFinished(endpoint.name, attempt, reply.status, time.monotonic() - began))
        if 200 <= reply.status < 300:
            return reply
        return without_secrets(reply, request, self.config.default_query)

    def _request(
        self,
        endpoint: Endpoint,
        value: Any,
        *,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Request:
        if endpoint.method == "GET":
            sent = self._headers_without_body.copy()
        else:
            sent = self._headers["proto" if endpoint.request_wire == "proto" else "json"].copy()
            sent["x-idempotency-key"] = f"{self._key}-{next(self._calls)}"
        if headers:
            sent.update(headers)
        parameters = self.config.default_query
        if query:
            given = {name: _query_text(item) for name, item in query.items() if item is not None}
            parameters = {**parameters, **given}
        return Request(
            endpoint.method,
            endpoint.url_path(path) if path else endpoint.path,
            sent,
            value if isinstance(value, bytes) else encode(endpoint, value),
            parameters,
            endpoint.purpose,
            timeout or self.config.timeout,
            endpoint=endpoint.name,
        )

    def _log(self, request: Request, attempt: int) -> None:
        if self.config.dump_headers:
            shown = request.shown_path or request.path
            logging.getLogger("tinkex").info(
                "%s %s attempt %d %s", request.method, shown, attempt, redacted_headers(request.headers)
            )

    def _record_failure(
        self,
        endpoint: Endpoint,
        attempt: int,
        began: float,
        error: APIError,
        guard: GuardedCall | None,
    ) -> None:
        """Reports a request without a reply to the sink and to the circuit breaker."""
        self.sink.emit(RequestFinished(endpoint.name, attempt, None, time.monotonic() - began, error.message))
        if guard and isinstance(error, APIConnectionError):
            guard.failed(error)

    def about(self, endpoint: Endpoint, path: Mapping[str, str] | None = None) -> HttpRequest:
        """The request as errors show it."""
        return HttpRequest(endpoint.method, self.config.base_url + endpoint.url_path(path), endpoint.name)


def encode(endpoint: Endpoint, value: Any) -> bytes:
    """The body of a call: JSON or protobuf as the endpoint requires, empty for None."""
    if value is None:
        return b""
    if endpoint.request_wire == "proto":
        from tinkex._wire import proto

        return proto.encode_forward_backward(value)
    return json.encode(value, omit_none=endpoint.name not in _EXPLICIT_NULL)


def is_proxy_error(reply: Reply) -> bool:
    """Whether a 400 comes from a proxy: servers say what is wrong, proxies send an empty body."""
    return reply.status == 400 and not reply.body


def error_of(reply: Reply, about: HttpRequest, *, signed_url: bool = False) -> APIStatusError:
    """The typed error for a reply with an error status."""
    response = _response(reply, about)
    if 300 <= reply.status < 400:
        target = reply.headers.get("location", "another URL")
        return APIStatusError(f"{about.url} redirects to {target}; use that server as base_url", response)
    try:
        body: object | None = json.decode_any(reply.body) if reply.body else None
    except json.Malformed:
        body = None
    plain = status_error(response, body)
    hint = advice(reply.status, signed_url=signed_url)
    return type(plain)(f"{plain.message} (from {about.url}). {hint}".strip(), response, body)


def _response(reply: Reply, about: HttpRequest) -> HttpResponse:
    return HttpResponse(reply.status, reply.headers, reply.body.decode("utf-8", "replace"), about)


def _query_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
