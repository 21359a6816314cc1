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

from tinkex._runtime import background
from tinkex._transport.caller import PROTOCOL_VERSION
from tinkex._transport.retry import RetryPolicy
from tinkex._wire.endpoints import endpoint
from tinkex.errors import ClosedError
from tinkex.observability.telemetry.redaction import allowed, event_data, frames
from tinkex.types import telemetry as wire

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller
    from tinkex.observability.events import Event

__all__ = ["Reporter", "TelemetrySink"]

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
        """Reports an event; only allow-listed fields of ``data`` are sent. Returns whether it was queued."""
        return self._add(
            lambda common: wire.GenericEvent(
                event="GENERIC_EVENT",
                event_name=name.encode("utf-8", "replace").decode(),  # a lone surrogate would fail the batch
                event_data=allowed(data or {}),
                severity=severity,
                **common,
            )
        )

    def log_exception(self, error: BaseException, *, user_error: bool = False, fatal: bool = False) -> bool:
        """Reports an exception: its type, status and frames in this package; never its message."""
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        status = _status_of(error)
        if user_error:
            data = {"error_type": type(error).__name__, "status_code": status}
            return self.log("user_error", data, "WARNING")
        added = self._add(
            lambda common: wire.UnhandledExceptionEvent(
                event="UNHANDLED_EXCEPTION",
                error_type=kind,
                error_message="" if status is None else f"status {status}",
                traceback=frames(error),
                severity="CRITICAL" if fatal else "ERROR",
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
            if first:
                common = self._common()
                self._queue.append(wire.SessionStartEvent(event="SESSION_START", severity="INFO", **common))
            self._queue.append(make(self._common()))
            self._drained.clear()
            full = len(self._queue) >= MAX_BATCH_SIZE
        if first:
            atexit.register(self._at_exit)
            background().start(self._send_loop(), detached=True)
        if full:
            self.flush()
        return True

    def _common(self) -> dict[str, Any]:
        index, self._index = self._index, self._index + 1
        return {
            "event_id": str(uuid.uuid4()),
            "event_session_index": index,
            "timestamp": datetime.now(UTC),
        }

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


def _status_of(error: BaseException) -> int | None:
    """Returns an exception's HTTP status; a foreign ``status_code`` attribute may be anything, or raise."""
    try:
        status = getattr(error, "status_code", None)
    except Exception:  # noqa: BLE001 - a property of a foreign exception class
        return None
    return int(status) if isinstance(status, int) and 100 <= status < 600 else None


class TelemetrySink:
    """Subscribes a reporter to a client's events: it reports those that ``redaction`` allows."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def emit(self, event: Event) -> None:
        """Receives one event."""
        data = event_data(event)
        # Failures of telemetry itself are not reported: that would cause more of them.
        if data is not None and data.get("purpose") != "telemetry":
            self._reporter.log(f"tinkex.{type(event).__name__}", data)
