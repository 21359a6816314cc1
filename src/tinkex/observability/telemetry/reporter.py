"""The telemetry reporter of a session: a bounded queue, sent to the server in batches in the background.

It never blocks or fails the program: a full queue drops events, an unresponsive server loses them, and interpreter
exit waits for a bounded time. A session that reports nothing sends nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import platform
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tinkex._runtime import background, check_may_block
from tinkex._transport.caller import PROTOCOL_VERSION
from tinkex._transport.retry import RetryPolicy
from tinkex._wire.endpoints import endpoint
from tinkex.errors import APIStatusError, ClosedError, EngineError, RequestErrorCategory, RequestFailedError
from tinkex.observability.events import RequestFinished, TelemetryDataDropped
from tinkex.observability.telemetry.redaction import MAX_TEXT_LENGTH, event_data, frames, redact
from tinkex.types import telemetry as wire

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller
    from tinkex.observability.events import Event

__all__ = ["Reporter", "TelemetrySink", "is_user_error"]

_ENDPOINT = endpoint("telemetry")
MAX_BATCH_SIZE = 100
INTERVAL_S = 10.0
MAX_QUEUE_SIZE = 10_000
SEND_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 2.0
"""How long closing a session, or interpreter exit, waits for queued events."""
RETRY_POLICY = RetryPolicy(max_retries=2, total_s=15.0, base_s=1.0)


class Reporter:
    """Reports events of one session; every method is thread-safe.

    ::

        reporter = service.get_telemetry()
        if reporter is not None:
            reporter.log("warmup_done", {"duration_s": 3.2})
    """

    def __init__(self, caller: Caller, session_id: str, *, interval_s: float = INTERVAL_S) -> None:
        self._caller = caller
        self._session_id = session_id
        self._interval_s = interval_s
        config = caller.config
        secrets = (config.api_key, config.cloudflare_client_secret, config.credential_cmd, config.proxy)
        named = (
            *config.default_headers.values(),
            *config.default_query.values(),
            *config.proxy_headers.values(),
        )
        self._secrets = [secret for secret in (*secrets, *named) if secret]
        """What is masked in the program's data, whatever the name of the field."""
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        """Starts with an empty queue and new locks; after a fork, the old ones belong to the parent."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: deque[wire.TelemetryEvent] = deque()
        self._index = 0
        self._started_at = time.monotonic()
        self._sending: asyncio.Task[None] | None = None
        self._drained = threading.Event()
        self._drained.set()
        self._wake = asyncio.Event()
        self._process_uuid = str(uuid.uuid4())
        self.num_dropped = 0
        """Events that were lost, because the queue was full or the server did not accept them."""
        self._num_lost = 0
        """The part of ``num_dropped`` that had been queued."""
        self._num_lost_reported = 0
        """The part of ``_num_lost`` that ``wait_until_drained`` has reported."""

    # ---- public ----

    def log(self, name: str, data: Mapping[str, Any] | None = None, severity: wire.Severity = "INFO") -> bool:
        """Reports an event with numbers, booleans and short strings as its ``data``; returns whether it was queued.

        Secrets are masked. Other values are not sent: their names are in the event's ``dropped_fields``, and the client
        emits ``TelemetryDataDropped``.
        """
        name = name.encode("utf-8", "replace").decode()  # a lone surrogate would fail the batch
        sent, dropped = redact(data or {}, self._secrets)
        if dropped:
            sent["dropped_fields"] = ", ".join(dropped)[:MAX_TEXT_LENGTH]
            self._caller.sink.emit(TelemetryDataDropped(name, dropped))
        return self._add(
            lambda common: wire.GenericEvent(
                event="GENERIC_EVENT", event_name=name, event_data=sent, severity=severity, **common
            )
        )

    def log_exception(
        self,
        error: BaseException,
        severity: wire.Severity = "ERROR",
        *,
        user_error: bool | None = None,
        fatal: bool = False,
    ) -> bool:
        """Reports an exception: its type, status and frames in this package; never its message.

        A user error (by default if :func:`is_user_error` is true) is reported as a warning named ``user_error``, a ``fatal``
        exception as critical, and immediately.
        """
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        status = _status_of(error)
        if is_user_error(error) if user_error is None else user_error:
            data = {"error_type": type(error).__name__, "status_code": status}
            return self.log("user_error", data, "WARNING")
        added = self._add(
            lambda common: wire.UnhandledExceptionEvent(
                event="UNHANDLED_EXCEPTION",
                error_type=kind,
                error_message="" if status is None else f"status {status}",
                traceback=frames(error),
                severity="CRITICAL" if fatal else severity,
                **common,
            )
        )
        if fatal:
            self.flush()
        return added

    def flush(self) -> None:
        """Sends queued events now, in the background."""
        with contextlib.suppress(RuntimeError):  # the interpreter exits
            background().loop.call_soon_threadsafe(self._wake.set)

    def wait_until_drained(self, timeout: float = 30.0) -> bool:
        """Waits until the queue is empty, at most ``timeout`` seconds.

        Returns whether every event reported since the last call has reached the server.
        """
        if background().is_current_thread:
            return self._drained.is_set()
        self._check_fork()
        self.flush()
        drained = self._drained.wait(min(timeout, threading.TIMEOUT_MAX))
        with self._lock:
            reported, self._num_lost_reported = self._num_lost_reported, self._num_lost
            return drained and self._num_lost == reported

    def stop(self, timeout: float = 5.0) -> bool:
        """Reports the end of the session, sends queued events and stops, for at most ``timeout`` seconds.

        Returns whether everything was sent. Later events are dropped; the client itself keeps working. Closing the client
        stops it, too.
        """
        check_may_block()
        stopping = background().submit(self.close())
        try:
            stopping.result(timeout)
        except TimeoutError:
            return False
        return self.wait_until_drained(0.0)

    # ---- called by the session ----

    async def close(self) -> None:
        """Sends queued events, for a bounded time, and stops; runs on the background loop."""
        if self._closed:
            return
        self._check_fork()
        await asyncio.sleep(0)  # the sender task of an event just added may not have started
        with self._lock:
            active = self._sending is not None or bool(self._queue)
        if active:
            duration = str(timedelta(seconds=round(time.monotonic() - self._started_at, 3)))
            self._add(
                lambda common: wire.SessionEndEvent(
                    event="SESSION_END", duration=duration, severity="INFO", **common
                )
            )
        self._closed = True
        atexit.unregister(self._at_exit)
        sending = self._sending
        if sending is not None:
            self._wake.set()
            await asyncio.wait({sending}, timeout=DRAIN_TIMEOUT_S)
            sending.cancel()

    def _check_fork(self) -> None:
        if self._pid != os.getpid():
            self._reset()

    def _add(self, make: Any) -> bool:
        self._check_fork()
        with self._lock:
            if self._closed or len(self._queue) >= MAX_QUEUE_SIZE:
                self.num_dropped += 1
                return False
            first = self._index == 0
            event = make(_common(self._index + first))  # raises before anything is queued
            if first:
                self._queue.append(
                    wire.SessionStartEvent(event="SESSION_START", severity="INFO", **_common(0))
                )
            self._queue.append(event)
            self._index += 1 + first
            self._drained.clear()
            full = len(self._queue) >= MAX_BATCH_SIZE
        if first:
            atexit.register(self._at_exit)
        if first or (self._sending is not None and self._sending.done()):  # it ends with its event loop
            self._sending, self._wake = None, asyncio.Event()
            background().start(self._send_loop(), detached=True)
        if full:
            self.flush()
        return True

    async def _send_loop(self) -> None:
        self._sending = asyncio.current_task()
        try:
            while not (self._closed and not self._queue):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._wake.wait()
                self._wake.clear()
                await self._send_all()
        except ClosedError:
            pass  # the connections are closed
        finally:
            self._drop_queue()

    async def _send_all(self) -> None:
        while True:
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(MAX_BATCH_SIZE, len(self._queue)))]
                if not batch:
                    self._drained.set()
                    return
            request = wire.TelemetrySendRequest(
                events=batch,
                platform=platform.system(),
                sdk_version=PROTOCOL_VERSION,
                session_id=self._session_id,
                process_uuid=self._process_uuid,
            )
            try:
                await self._caller.call(_ENDPOINT, request, timeout=SEND_TIMEOUT_S, policy=RETRY_POLICY)
            except (ClosedError, asyncio.CancelledError):
                self._count_lost(len(batch))
                raise
            except Exception:  # noqa: BLE001 - counted; a failed batch must not stop later ones
                self._count_lost(len(batch))

    def _count_lost(self, count: int) -> None:
        with self._lock:
            self.num_dropped += count
            self._num_lost += count

    def _drop_queue(self) -> None:
        with self._lock:
            count = len(self._queue)
            self._queue.clear()
        self._count_lost(count)
        self._drained.set()

    def _at_exit(self) -> None:
        if self._pid == os.getpid():  # a forked child inherits the hook, and has nothing to send
            self.wait_until_drained(DRAIN_TIMEOUT_S)


def _common(index: int) -> dict[str, Any]:
    """The fields of every event."""
    return {
        "event_id": str(uuid.uuid4()),
        "event_session_index": index,
        "timestamp": datetime.now(UTC),
    }


def is_user_error(error: BaseException) -> bool:
    """Returns whether the user is at fault for an exception, or for one that caused it: its category, or a 4xx except 408 and 429.

    >>> is_user_error(RequestFailedError("bad data", "r1", RequestErrorCategory.User))
    True
    >>> is_user_error(RuntimeError("boom"))
    False
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        at_fault = (
            link.category if isinstance(link, APIStatusError | RequestFailedError | EngineError) else None
        )
        status = _status_of(link)
        rejected = status is not None and 400 <= status < 500 and status not in {408, 429}
        if rejected or at_fault is RequestErrorCategory.User:
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def _status_of(error: BaseException) -> int | None:
    """Returns an exception's HTTP status; a foreign ``status_code`` attribute may be anything, or raise."""
    try:
        status = getattr(error, "status_code", None)
    except Exception:  # noqa: BLE001 - a property of a foreign exception class
        return None
    return int(status) if isinstance(status, int) and 100 <= status < 600 else None


class TelemetrySink:
    """Subscribes a reporter to a client's events: it reports those that ``redaction`` allows.

    Of requests it reports those that failed, or with ``all_requests`` every one.
    """

    def __init__(self, reporter: Reporter, *, all_requests: bool = False) -> None:
        self._reporter = reporter
        self._all_requests = all_requests

    def emit(self, event: Event) -> None:
        """Receives one event."""
        failed = False
        if isinstance(event, RequestFinished):
            failed = event.failed
            # Requests of telemetry itself are not reported: that would cause more of them.
            if event.endpoint == _ENDPOINT.name or not (failed or self._all_requests):
                return
        data = event_data(event)
        if data is not None and data.get("purpose") != "telemetry":
            name = f"tinkex.{type(event).__name__}"
            self._reporter.log(name, data, "WARNING" if failed else "INFO")
