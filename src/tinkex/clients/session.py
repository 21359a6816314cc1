"""A session: one program's life on a server, opened at first use and kept alive by heartbeats."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tinkex import types
from tinkex._runtime import background, create_detached_task
from tinkex._transport.budget import ByteBudget
from tinkex._transport.caller import PROTOCOL_VERSION
from tinkex._transport.limiter import Limiter, limiter_for
from tinkex._transport.retry import NO_RETRIES, RetryPolicy, is_transient
from tinkex._transport.shared import SharedHttp
from tinkex._wire.endpoints import endpoint
from tinkex.clients._cancellations import Cancellations
from tinkex.clients._custom_losses import CustomLosses
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
HEARTBEAT_S = 10.0
HEARTBEAT_WARNING_S = 120.0
SHORTEST_REFRESH_S = 10.0
LOST = frozenset({404, 410})
"""What a server answers to the heartbeat of a session that it does not have, or has ended."""
FINISH = RetryPolicy(max_retries=2, total_s=15.0)


@dataclass(frozen=True)
class OpenSession:
    """What is known once a server has accepted the session."""

    session_id: str
    client_config: types.ClientConfigResponse
    results: Results
    training_bytes: ByteBudget
    """Bytes of training data being submitted at once."""
    sampling: Limiter
    """Gates the submission of samples of this session."""


class Session:
    """Opens a session when it is first needed, keeps it alive, and finishes it.

    All methods that are coroutines run on the background loop.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        display_name: str | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        heartbeat_warning_s: float = HEARTBEAT_WARNING_S,
        shortest_refresh_s: float = SHORTEST_REFRESH_S,
    ) -> None:
        self.pid = os.getpid()
        """The process it belongs to: its numbers are counted there."""
        self.caller = caller
        self.dynamic_config = types.ClientDynamicConfigResponse()
        self._display_name = display_name
        self._heartbeat_s = heartbeat_s
        self._heartbeat_warning_s = heartbeat_warning_s
        self._shortest_refresh_s = shortest_refresh_s
        self._opening: asyncio.Task[OpenSession] | None = None
        self._open: OpenSession | None = None
        self._heart: asyncio.Task[None] | None = None
        self._closed = False
        self._telemetry_sink: TelemetrySink | None = None
        self.telemetry: Reporter | None = None
        """Reports about this session; None before it is open, and where nothing may be reported."""
        self.custom_losses = CustomLosses(caller)
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
        """The open session; the first caller opens it and the others wait for that."""
        self.check_open()
        if self._open is not None:
            return self._open
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_it())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                self.check_open()  # close() cancelled the opening, not the caller that waits for it
            raise
        finally:
            if opening.done() and self._opening is opening:
                self._opening = None  # a failure is tried again by the next caller

    async def renew_if_lost(self) -> bool:
        """Opens another session where the server has forgotten or ended this one; whether it did.

        What was made in the old session stays bound to it. A server that cannot say so raises its error.
        """
        self.check_open()
        held = self._open
        if held is None:
            return False  # the next call opens one in any case
        try:
            await self.caller.call(
                endpoint("session_heartbeat"),
                types.SessionHeartbeatRequest(session_id=held.session_id),
                timeout=HEARTBEAT_S,
            )
        except APIStatusError as error:
            if error.status_code not in LOST:
                raise
            if self._open is held:  # unless somebody else has noticed it, too
                self._let_go(held, error.message)
            await self.opened()
            return True
        return False

    def _let_go(self, held: OpenSession, reason: str) -> None:
        if self._heart is not None and not self._heart.done():
            self._heart.cancel()
            self.caller.sink.emit(SessionLost(held.session_id, reason))
        if self.telemetry is not None:
            assert self._telemetry_sink is not None
            self.caller.sink.unsubscribe(self._telemetry_sink)
            create_detached_task(self.telemetry.close())
            self.telemetry = None
        self.custom_losses = CustomLosses(self.caller)  # the next session knows none of them
        self._open = None

    def join(self, session_id: str, client_config: types.ClientConfigResponse) -> OpenSession:
        """Takes part in a session that another process opened: nothing is sent, and heartbeats begin."""
        use_tokens(self.caller, client_config)
        background().start(self._beat(session_id), detached=True)
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
        """The address of a page in the hosted service's console, by default this session's own."""
        if not self.caller.config.is_hosted:
            raise SetupError(
                f"{self.caller.config.base_url} has no console; only the hosted service has one. "
                "RestClient lists the sessions, runs and checkpoints of every server"
            )
        if page is None:
            page = "sessions" if self._open is None else f"sessions/{self._open.session_id}"
        return f"{CONSOLE_URL}/{page}"

    async def close(self, status: FinishStatus, detail: str | None = None) -> None:
        """Tells the server how the program ended, stops the heartbeats and closes the connections.

        A server that cannot be told ends the session by itself when the heartbeats stay away, so that
        failure is an event, not an error. Closing twice does nothing.
        """
        if self._closed:
            return
        self._closed = True
        for task in (self._opening, self._heart):
            if task is not None:
                task.cancel()
        if self._open is not None:
            session_id = self._open.session_id
            failure = None
            try:
                with trace_operation("close", on=self.caller.config.tracing):
                    await self.caller.call(
                        endpoint("finish_session"),
                        types.FinishSessionRequest(reason=types.FinishReason(type=status), detail=detail),
                        path={"session_id": session_id},
                        timeout=HEARTBEAT_S,
                        policy=FINISH,
                    )
            except APIError as error:
                failure = error.message
            self.caller.sink.emit(SessionClosed(session_id, status, failure))
        if self.telemetry is not None:
            await self.telemetry.close()
        await self.caller.close()

    async def _open_it(self) -> OpenSession:
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
            self._telemetry_sink = TelemetrySink(self.telemetry)
            self.caller.sink.subscribe(self._telemetry_sink)
        self.caller.sink.emit(SessionOpened(created.session_id))
        for level in ("info", "warning", "error"):
            text = getattr(created, f"{level}_message")
            if text:
                self.caller.sink.emit(ServerMessage(created.session_id, level, text))
        self._heart = create_detached_task(self._beat(created.session_id))
        return opened

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

    async def _beat(self, session_id: str) -> None:
        """Heartbeats until the server wants no more, and refreshes the dynamic configuration on the way."""
        heard = warned = refreshed = time.monotonic()
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self.caller.call(
                    endpoint("session_heartbeat"),
                    types.SessionHeartbeatRequest(session_id=session_id),
                    timeout=HEARTBEAT_S,
                    policy=NO_RETRIES,
                )
                heard = warned = time.monotonic()
            except APIStatusError as error:
                if _ends_session(error.status_code):
                    self.caller.sink.emit(SessionLost(session_id, error.message))
                    return
            except APIError:
                pass  # the time since the last success says it all
            except ClosedError:
                return  # the connections are gone, and with them whoever could be told
            now = time.monotonic()
            if now - warned >= self._heartbeat_warning_s:
                warned = now
                self.caller.sink.emit(HeartbeatLost(session_id, now - heard))
            if now - refreshed >= max(self.dynamic_config.refresh_interval_sec, self._shortest_refresh_s):
                refreshed = now
                await self._refresh()

    async def _refresh(self) -> None:
        request = types.ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
        try:
            self.dynamic_config = await self.caller.call(
                endpoint("client_dynamic_config"), request, timeout=HEARTBEAT_S, policy=NO_RETRIES
            )
        except (APIConnectionError, APIStatusError):
            return  # the old values stay in force


def _ends_session(status: int) -> bool:
    """A client error says that the server will never take this heartbeat; anything else passes.

    >>> [status for status in (400, 402, 404, 408, 410, 429, 500) if _ends_session(status)]
    [400, 404, 410]
    """
    return 400 <= status < 500 and status != 402 and not is_transient(status)
