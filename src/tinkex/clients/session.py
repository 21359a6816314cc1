"""A session of one program on a server: opened at first use and kept alive by heartbeats."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tinkex import types
from tinkex._runtime import background, create_detached_task, resume_on_new_loop
from tinkex._transport.budget import ByteBudget
from tinkex._transport.caller import PROTOCOL_VERSION
from tinkex._transport.limiter import Limiter, limiter_for
from tinkex._transport.retry import NO_RETRIES, RetryPolicy, is_transient
from tinkex._transport.shared import SharedHttp
from tinkex._wire.endpoints import endpoint
from tinkex.clients._cancellations import Cancellations
from tinkex.clients._custom_losses import CustomLossRegistry
from tinkex.clients._tokens import use_tokens
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    ClosedError,
    NotFoundError,
    SetupError,
)
from tinkex.futures import Results
from tinkex.observability.events import (
    HeartbeatFailed,
    HeartbeatLost,
    ServerMessage,
    SessionClosed,
    SessionLost,
    SessionOpened,
)
from tinkex.observability.telemetry.reporter import Reporter, TelemetrySink
from tinkex.observability.tracing import trace_operation

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller

__all__ = ["FinishStatus", "OpenSession", "Session"]

FinishStatus = Literal["success", "errored", "interrupted"]

CONSOLE_URL = "https://tinker.thinkingmachines.ai"
HEARTBEAT_INTERVAL_S = 10.0
HEARTBEAT_TIMEOUT_S = 10.0
HEARTBEAT_WARNING_S = 120.0
MIN_REFRESH_INTERVAL_S = 10.0
LOST = frozenset({404, 410})
"""Statuses of the heartbeat of a session that does not exist, or has ended."""
FINISH = RetryPolicy(max_retries=2, total_s=15.0)


@dataclass(frozen=True)
class OpenSession:
    """The state of a session that the server has accepted."""

    session_id: str
    client_config: types.ClientConfigResponse
    results: Results
    training_bytes: ByteBudget
    """Limits the bytes of training data in submission."""
    sampling: Limiter
    """Limits the submission of samples."""


class Session:
    """Opens a session when it is first needed, keeps it alive, and finishes it.

    All methods that are coroutines run on the background loop.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        display_name: str | None = None,
        lazy: bool = False,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        heartbeat_warning_s: float = HEARTBEAT_WARNING_S,
        min_refresh_interval_s: float = MIN_REFRESH_INTERVAL_S,
    ) -> None:
        self.pid = os.getpid()
        """The process of this session, which counts its sequence numbers."""
        self.caller = caller
        self.lazy = lazy
        """Whether methods that create clients never wait."""
        self.dynamic_config = types.ClientDynamicConfigResponse()
        self._display_name = display_name
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat_warning_s = heartbeat_warning_s
        self._min_refresh_interval_s = min_refresh_interval_s
        self._opening: asyncio.Task[OpenSession] | None = None
        self._open: OpenSession | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._closed = False
        self._telemetry_sink: TelemetrySink | None = None
        self.telemetry: Reporter | None = None
        """The telemetry of this session; None before the session is open, and if telemetry is off."""
        self.custom_losses = CustomLossRegistry(caller)
        self.cancellations = Cancellations(caller, lambda: self.dynamic_config)
        self._model_seq_ids = itertools.count()
        self._sampling_session_seq_ids = itertools.count()

    def check_open(self) -> None:
        """Raises ``ClosedError`` if the session was closed, or in a forked child; callable from any thread."""
        if self.pid != os.getpid():
            raise ClosedError(
                "this client belongs to the process that this one was forked from; "
                "make a ServiceClient here, or use a SamplingClient, which works in both"
            )
        if self._closed:
            raise ClosedError("this ServiceClient was closed; make a new one")

    async def opened(self) -> OpenSession:
        """Returns the open session; the first call opens it, and concurrent ones wait for that."""
        self.check_open()
        if self._open is not None:
            return self._open
        if self._opening is None or self._opening.done():  # one that ended with its loop is still here
            self._opening = asyncio.create_task(self._open_session())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                self.check_open()  # close() cancelled the opening, not the caller that waits for it
            raise
        finally:
            if opening.done() and self._opening is opening:
                self._opening = None  # after a failure the next call opens it again

    async def renew_if_lost(self) -> bool:
        """Opens a new session if the server has deleted or ended this one; returns whether it did.

        Clients of the old session stay bound to it. Other errors of the server are raised.
        """
        self.check_open()
        opened = self._open
        if opened is None:
            return False  # the next call opens one anyway
        try:
            await self.caller.call(
                endpoint("session_heartbeat"),
                types.SessionHeartbeatRequest(session_id=opened.session_id),
                timeout=HEARTBEAT_TIMEOUT_S,
            )
        except APIStatusError as error:
            if error.status_code not in LOST:
                raise
            if self._open is opened:  # unless another call has replaced it
                self._drop(opened, error.message)
            await self.opened()
            return True
        return False

    def _drop(self, opened: OpenSession, reason: str) -> None:
        if self._heartbeats is not None and not self._heartbeats.done():
            self._heartbeats.cancel()
            self.caller.sink.emit(SessionLost(opened.session_id, reason))
        if self.telemetry is not None:
            assert self._telemetry_sink is not None
            self.caller.sink.unsubscribe(self._telemetry_sink)
            create_detached_task(self.telemetry.close())
            self.telemetry = None
        self.custom_losses = CustomLossRegistry(self.caller)  # they belong to the old session
        self._open = None

    def join(self, session_id: str, client_config: types.ClientConfigResponse) -> OpenSession:
        """Joins a session that another process opened: nothing is sent, and heartbeats start."""
        use_tokens(self.caller, client_config)
        resume_on_new_loop(self)
        background().start(self._send_heartbeats(session_id), detached=True)
        return self._enter(session_id, client_config)

    def next_model_seq_id(self) -> int:
        """The number of the next model of this session, from 0."""
        return next(self._model_seq_ids)

    def next_sampling_session_seq_id(self) -> int:
        """The number of the next sampler of this session, from 0."""
        return next(self._sampling_session_seq_ids)

    def get_session_id(self) -> str:
        """The id of the open session; opens it if it is not yet."""
        opened = self._open
        return (opened if opened is not None else background().run(self.opened())).session_id

    def console_url(self, page: str | None = None) -> str:
        """The URL of a page in the hosted service's console, by default this session's page."""
        if not self.caller.config.is_hosted:
            raise SetupError(
                f"{self.caller.config.base_url} has no console; only the hosted service has one. "
                "RestClient lists the sessions, runs and checkpoints of every server"
            )
        if page is None:
            page = "sessions" if self._open is None else f"sessions/{self._open.session_id}"
        return f"{CONSOLE_URL}/{page}"

    def close(self) -> None:
        """Stops the heartbeats and closes the connections, without a report to the server; returns immediately.

        ``ServiceClient.close`` reports how the program ended.
        """
        if not self._closed:
            self._closed = True
            background().start(self._release(), detached=True)

    async def finish(self, status: FinishStatus, detail: str | None = None) -> None:
        """Reports to the server how the program ended, stops the heartbeats and closes the connections.

        The server ends a session without heartbeats by itself, so that a failure of the report is an event and not an
        error. Closing twice does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._stop_tasks()
        if self._open is not None:
            session_id = self._open.session_id
            failure = None
            try:
                with trace_operation("close", on=self.caller.config.tracing):
                    await self.caller.call(
                        endpoint("finish_session"),
                        types.FinishSessionRequest(reason=types.FinishReason(type=status), detail=detail),
                        path={"session_id": session_id},
                        timeout=HEARTBEAT_TIMEOUT_S,
                        policy=FINISH,
                    )
            except APIError as error:
                failure = error.message
            self.caller.sink.emit(SessionClosed(session_id, status, failure))
        await self._release()

    async def _release(self) -> None:
        self._stop_tasks()
        if self.telemetry is not None:
            await self.telemetry.close()
        await self.caller.close()

    def _stop_tasks(self) -> None:
        for task in (self._opening, self._heartbeats):
            if task is not None:
                task.cancel()

    async def _open_session(self) -> OpenSession:
        request = types.ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
        client_config: types.ClientConfigResponse = await self.caller.call(endpoint("client_config"), request)
        use_tokens(self.caller, client_config)
        try:
            self.dynamic_config = await self.caller.call(endpoint("client_dynamic_config"), request)
        except NotFoundError:
            self.dynamic_config = types.ClientDynamicConfigResponse()  # older servers have none
        config = self.caller.config
        created: types.CreateSessionResponse = await self.caller.call(
            endpoint("create_session"),
            types.CreateSessionRequest(
                tags=list(config.tags),
                user_metadata=dict(config.user_metadata),
                sdk_version=PROTOCOL_VERSION,
                project_id=config.project_id,
                display_name=self._display_name,
            ),
        )
        opened = self._enter(created.session_id, client_config)
        if config.telemetry and isinstance(self.caller.transport, SharedHttp):
            self.telemetry = Reporter(self.caller, created.session_id)
            self._telemetry_sink = TelemetrySink(self.telemetry, all_requests=config.telemetry_requests)
            self.caller.sink.subscribe(self._telemetry_sink)
        self.caller.sink.emit(SessionOpened(created.session_id))
        for level in ("info", "warning", "error"):
            text = getattr(created, f"{level}_message")
            if text:
                self.caller.sink.emit(ServerMessage(created.session_id, level, text))
        resume_on_new_loop(self)
        self._heartbeats = create_detached_task(self._send_heartbeats(created.session_id))
        return opened

    def resume(self) -> None:
        """Starts the heartbeats again that ended with their event loop."""
        heartbeats = self._heartbeats
        if self._open is not None and not self._closed and heartbeats is not None and heartbeats.cancelled():
            self._heartbeats = create_detached_task(self._send_heartbeats(self._open.session_id))

    def _enter(self, session_id: str, client_config: types.ClientConfigResponse) -> OpenSession:
        pause_s = client_config.billing_exception_max_pause_duration_sec
        self.caller.policy = replace(self.caller.policy, payment_pause_s=pause_s)
        inflight = ByteBudget(client_config.inflight_response_bytes_semaphore_size)
        self._open = opened = OpenSession(
            session_id=session_id,
            client_config=client_config,
            results=Results(self.caller, inflight, payment_pause_s=pause_s),
            training_bytes=ByteBudget(client_config.fwdbwd_dispatch_bytes_semaphore_size),
            sampling=limiter_for(self.caller, client_config.sample_dispatch_bytes_semaphore_size),
        )
        return opened

    async def _send_heartbeats(self, session_id: str) -> None:
        """Sends heartbeats until the server rejects them or the client is closed, and refreshes the dynamic configuration."""
        self._heartbeats = asyncio.current_task()
        last_success = warned = refreshed = time.monotonic()
        while True:
            await asyncio.sleep(self._heartbeat_interval_s)
            accepted = False
            try:
                accepted = await self._send_heartbeat(session_id)
            except _SessionEnded as ended:
                self.caller.sink.emit(SessionLost(session_id, str(ended)))
                return
            except ClosedError as error:
                if not self._closed and not self.caller.closed:
                    self.caller.sink.emit(SessionLost(session_id, str(error)))
                return
            except Exception as error:  # noqa: BLE001 - emitted; without heartbeats the server would end the session
                self._emit_failure(session_id, error)
            now = time.monotonic()
            if accepted:
                last_success = warned = now
            elif now - warned >= self._heartbeat_warning_s:
                warned = now
                self.caller.sink.emit(HeartbeatLost(session_id, now - last_success))
            if now - refreshed >= max(self.dynamic_config.refresh_interval_sec, self._min_refresh_interval_s):
                refreshed = now
                await self._refresh(session_id)

    def _emit_failure(self, session_id: str, error: Exception) -> None:
        self.caller.sink.emit(HeartbeatFailed(session_id, f"{type(error).__name__}: {error}"))

    async def _send_heartbeat(self, session_id: str) -> bool:
        """Returns whether the server accepted a heartbeat."""
        try:
            await self.caller.call(
                endpoint("session_heartbeat"),
                types.SessionHeartbeatRequest(session_id=session_id),
                timeout=HEARTBEAT_TIMEOUT_S,
                policy=NO_RETRIES,
            )
        except APIStatusError as error:
            if _ends_session(error.status_code):
                raise _SessionEnded(error.message) from error
            return False
        except APIConnectionError:
            return False  # it counts as time since the last success
        return True

    async def _refresh(self, session_id: str) -> None:
        request = types.ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
        try:
            self.dynamic_config = await self.caller.call(
                endpoint("client_dynamic_config"), request, timeout=HEARTBEAT_TIMEOUT_S, policy=NO_RETRIES
            )
        except (APIConnectionError, APIStatusError, ClosedError):
            return  # the old values stay in use
        except Exception as error:  # noqa: BLE001 - emitted; the old values stay in use
            self._emit_failure(session_id, error)


class _SessionEnded(Exception):
    """The server rejects the heartbeats of a session."""


def _ends_session(status: int) -> bool:
    """Whether a status ends the session: after a client error the server never accepts this heartbeat again.

    >>> [status for status in (400, 402, 404, 408, 410, 429, 500) if _ends_session(status)]
    [400, 404, 410]
    """
    return 400 <= status < 500 and status != 402 and not is_transient(status)
