"""The reporter of a session: events go into a bounded queue, and to the server in batches, in the background.

It never blocks and never fails the program: a full queue drops, a server that does not answer is given up, and
the end of the program waits for it for a bounded time. A session in which nothing is reported sends nothing.
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

_ROW = endpoint("telemetry")
BATCH = 100
INTERVAL_S = 10.0
QUEUE = 10_000
TIMEOUT_S = 5.0
DRAIN_S = 2.0
"""How long closing a session, or the end of the program, waits for what is still queued."""
TRIES = RetryPolicy(max_retries=2, total_s=15.0, base_s=1.0)


class Reporter:
    """Reports about one session; every method may be called from any thread.

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
        self._start_anew()

    def _start_anew(self) -> None:
        """Begins with nothing: what was queued before a fork is the parent's to send, and so are its locks and tasks."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: deque[wire.TelemetryEvent] = deque()
        self._index = 0
        self._began = time.monotonic()
        self._sending: asyncio.Task[None] | None = None
        self._drained = threading.Event()
        self._drained.set()
        self._soon = asyncio.Event()
        self._process_uuid = str(uuid.uuid4())
        self.num_dropped = 0
        """Events that were lost, because the queue was full or the server did not take them."""
        self._num_lost = 0
        """Those of them that were queued."""
        self._num_lost_known = 0
        """Those of these that ``wait_until_drained`` has reported."""

    # ---- for the program ----

    def log(self, name: str, data: Mapping[str, Any] | None = None, severity: wire.Severity = "INFO") -> bool:
        """Reports that something happened; of ``data`` only known, harmless fields are sent. Says if it was queued."""
        return self._add(
            lambda common: wire.GenericEvent(
                event="GENERIC_EVENT",
                event_name=name.encode("utf-8", "replace").decode(),  # half a character would spoil the batch
                event_data=allowed(data or {}),
                severity=severity,
                **common,
            )
        )

    def log_exception(self, error: BaseException, *, user_error: bool = False, fatal: bool = False) -> bool:
        """Reports an exception: its type, its status and where in this package it was; never its text."""
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
        """Has what is queued sent now, in the background."""
        with contextlib.suppress(RuntimeError):  # the program is ending
            background().loop.call_soon_threadsafe(self._soon.set)

    def wait_until_drained(self, timeout: float = 30.0) -> bool:
        """Waits until nothing is queued any more, for a bounded time.

        Returns whether everything that was reported since the last call has reached the server.
        """
        if background().is_current_thread:
            return self._drained.is_set()
        self._notice_fork()
        self.flush()
        drained = self._drained.wait(min(timeout, threading.TIMEOUT_MAX))
        with self._lock:
            known, self._num_lost_known = self._num_lost_known, self._num_lost
            return drained and self._num_lost == known

    # ---- for the session ----

    async def close(self) -> None:
        """Sends what is left, for a bounded time, and ends; runs on the background loop."""
        if self._closed:
            return
        self._notice_fork()
        await asyncio.sleep(0)  # the sender of an event that was added a moment ago may not have begun
        with self._lock:
            wanted = self._sending is not None or bool(self._queue)
        if wanted:
            duration = str(timedelta(seconds=round(time.monotonic() - self._began, 3)))
            self._add(
                lambda common: wire.SessionEndEvent(
                    event="SESSION_END", duration=duration, severity="INFO", **common
                )
            )
        self._closed = True
        atexit.unregister(self._at_exit)
        sending = self._sending
        if sending is not None:
            self._soon.set()
            await asyncio.wait({sending}, timeout=DRAIN_S)
            sending.cancel()

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            self._start_anew()

    def _add(self, make: Any) -> bool:
        self._notice_fork()
        with self._lock:
            if self._closed or len(self._queue) >= QUEUE:
                self.num_dropped += 1
                return False
            first = self._index == 0
            if first:
                common = self._common()
                self._queue.append(wire.SessionStartEvent(event="SESSION_START", severity="INFO", **common))
            self._queue.append(make(self._common()))
            self._drained.clear()
            full = len(self._queue) >= BATCH
        if first:
            atexit.register(self._at_exit)
            background().start(self._begin(), alone=True)
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

    async def _begin(self) -> None:
        self._sending = asyncio.current_task()
        try:
            while not (self._closed and not self._queue):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._soon.wait()
                self._soon.clear()
                await self._send_all()
        except ClosedError:
            pass  # the connections are gone, and with them whoever could be told
        finally:
            self._give_up()

    async def _send_all(self) -> None:
        while True:
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
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
                await self._caller.call(_ROW, request, timeout=TIMEOUT_S, policy=TRIES)
            except (ClosedError, asyncio.CancelledError):
                self._lose(len(batch))
                raise
            except Exception:  # noqa: BLE001 - counted; whatever is wrong with a report must not end those after it
                self._lose(len(batch))

    def _lose(self, count: int) -> None:
        with self._lock:
            self.num_dropped += count
            self._num_lost += count

    def _give_up(self) -> None:
        with self._lock:
            count = len(self._queue)
            self._queue.clear()
        self._lose(count)
        self._drained.set()

    def _at_exit(self) -> None:
        if self._pid == os.getpid():  # a forked child inherits the call, and has nothing to wait for
            self.wait_until_drained(DRAIN_S)


def _status_of(error: BaseException) -> int | None:
    """The status that an exception carries; exceptions of others may say anything under that name, or raise."""
    try:
        status = getattr(error, "status_code", None)
    except Exception:  # noqa: BLE001 - a property of somebody else's, in the middle of somebody else's trouble
        return None
    return int(status) if isinstance(status, int) and 100 <= status < 600 else None


class TelemetrySink:
    """Subscribes a reporter to a client's events: it reports those that are on the list."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def emit(self, event: Event) -> None:
        """Takes one event."""
        data = event_data(event)
        # Troubles of telemetry itself are not reported: they would cause more of them.
        if data is not None and data.get("purpose") != "telemetry":
            self._reporter.log(f"tinkex.{type(event).__name__}", data)
