"""Client configuration, capabilities, telemetry and sessions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.errors import json_response
from tinkex.engine.api.limits import MAX_TEXT_BYTES, check_stored_size, page, wants_accessible
from tinkex.engine.api.pages import text_values
from tinkex.engine.lookup import find_session
from tinkex.engine.quotas import Quotas
from tinkex.engine.store import SessionRow, Store
from tinkex.errors import Expired, InvalidInput, TooLarge
from tinkex.types import (
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    GetServerCapabilitiesResponse,
    GetSessionResponse,
    ListSessionsResponse,
    SessionHeartbeatResponse,
    SupportedModel,
    TelemetryResponse,
)
from tinkex.types.sampling import SAMPLING_EXTENSIONS

STARTING = 503
"""Load balancers do not route to a server that returns it, and clients retry."""
MAX_EVENTS = 1000
"""Telemetry events in one request; clients send up to 100."""


async def client_config(call: Call) -> Reply:
    """Returns the features that clients should use."""
    return ClientConfigResponse(
        # Without keys there is nothing to issue a token for.
        pjwt_auth_enabled=call.engine.config.auth,
        # N samples in flight need one open poll instead of N, so their number needs no limit.
        sample_use_retrieve_futures=True,
        sample_join_sampling_session=True,
        create_model_via_load_weights=True,
        custom_loss_server_side=True,
        sampling_extensions=list(SAMPLING_EXTENSIONS),
        training_extensions=["metrics", "rollouts"],
    )


async def client_dynamic_config(_call: Call) -> Reply:
    """Asks clients to cancel abandoned samples, which then leave the decode batch immediately."""
    return ClientDynamicConfigResponse(sample_cancel_enabled=True)


async def healthz(call: Call) -> Reply:
    """Returns the health of the server, with the reasons if it is degraded; 503 while it starts.

    ``worker`` is the status of the worker process, if there is one; ``lanes`` are those of several, and ``samplers`` counts those
    whose number follows the load.
    """
    health, lanes, samplers = call.engine.health, call.engine.workers, call.engine.samplers
    status, state = health.status, health.state
    content: dict[str, Any] = {"status": status}
    if samplers is not None:
        content["samplers"] = asdict(samplers)
    if not call.engine.has_several_lanes:
        (worker,) = lanes.values()
        content |= {"worker": asdict(worker)} if worker is not None else {}
    else:
        content["lanes"] = {
            name: asdict(worker) if worker is not None else {} for name, worker in lanes.items()
        }
    if state == "starting":
        response = json_response({**content, "detail": status}, STARTING)
        response.headers["retry-after"] = "1"
        return response
    return json_response(content)


async def get_server_capabilities(call: Call) -> Reply:
    """Returns the served models."""
    models = call.engine.models
    supported = []
    for name in models.names:
        model = models.find(name)
        described = model.describe() if model.known else await asyncio.to_thread(model.describe)
        supported.append(
            SupportedModel(
                model_name=name,
                max_context_length=described.max_context_length,
                trainable=True,
                sampleable=True,
                model_id=name,
                arch=described.family,
            )
        )
    return GetServerCapabilitiesResponse(supported_models=supported)


async def telemetry(call: Call) -> Reply:
    """Counts events without storing or logging them, because they may contain API keys."""
    if len(call.request.events) > MAX_EVENTS:
        raise TooLarge(f"a request has at most {MAX_EVENTS} telemetry events; send fewer per request.")
    call.request_metrics.record_client_events(call.request.events)
    return TelemetryResponse()


async def create_session(call: Call) -> Reply:
    """Open a session."""
    request: CreateSessionRequest = call.request
    check_stored_size("user_metadata", request.user_metadata)
    check_stored_size("tags", request.tags)
    for field in ("sdk_version", "project_id", "display_name"):
        check_stored_size(field, getattr(request, field), MAX_TEXT_BYTES)
    Quotas(call.engine.config, call.engine.store).check_room(call.owner, len(call.body))
    now = time.time()
    session = SessionRow(
        session_id=str(uuid.uuid4()),
        owner=call.owner,
        created_at=now,
        seen_at=now,
        tags=request.tags,
        user_metadata=request.user_metadata,
        sdk_version=request.sdk_version,
        project_id=request.project_id,
        display_name=request.display_name,
    )
    call.engine.store.sessions.add(session)
    return CreateSessionResponse(session_id=session.session_id)


async def session_heartbeat(call: Call) -> Reply:
    """Record a heartbeat; a finished session returns 410, which stops the client's heartbeats."""
    session = find_session(call.engine.store, call.owner, call.request.session_id)
    if session.finished_at is not None:
        raise Expired(f"session {session.session_id} is finished.")
    call.engine.store.sessions.record_heartbeat(session.session_id, time.time())
    return SessionHeartbeatResponse()


async def finish_session(call: Call) -> Reply:
    """Finish a session; it keeps its first finish reason."""
    session = find_session(call.engine.store, call.owner, call.parameters["session_id"])
    check_stored_size("detail", call.request.detail)
    if len(call.body) > MAX_TEXT_BYTES:  # finishing frees space, so a short reason needs none
        Quotas(call.engine.config, call.engine.store).check_room(call.owner, len(call.body))
    call.engine.store.sessions.finish(
        session.session_id, time.time(), call.request.reason.type, call.request.detail
    )
    return None


async def assign_session_project(call: Call) -> Reply:
    """Move a session, with its runs and checkpoints, into a project."""
    session = find_session(call.engine.store, call.owner, call.parameters["session_id"])
    if not call.request.project_id:
        raise InvalidInput("project_id is empty; name the project that the session moves into.")
    check_stored_size("project_id", call.request.project_id, MAX_TEXT_BYTES)
    Quotas(call.engine.config, call.engine.store).check_room(call.owner, len(call.body))
    call.engine.store.sessions.set_project(session.session_id, call.request.project_id)
    return None


async def list_sessions(call: Call) -> Reply:
    """Returns a page of the user's sessions, optionally with those of others that have published checkpoints; newest first."""
    limit, offset = page(call.query, default_limit=20)
    public_at = time.time() if wants_accessible(call.query) else None
    ids = call.engine.store.sessions.list_ids(call.owner, limit, offset, public_at)
    return ListSessionsResponse(sessions=list(ids))


async def get_session(call: Call) -> Reply:
    """Returns the runs and samplers of the user's session, or the public runs of another user's."""
    store, session_id = call.engine.store, call.parameters["session_id"]
    if wants_accessible(call.query):
        public = _public_runs(store, call.owner, session_id)
        if public:
            return GetSessionResponse(training_run_ids=public, sampler_ids=[])
    session = find_session(store, call.owner, session_id)
    return await call.run_on_thread(
        lambda: GetSessionResponse(
            training_run_ids=[run.run_id for run in store.runs.of_session(session.session_id)],
            sampler_ids=[sampler.sampler_id for sampler in store.samplers.of_session(session.session_id)],
            user_metadata=text_values(session.user_metadata or {}),
            display_name=session.display_name,
        )
    )


def _public_runs(store: Store, reader: str, session_id: str) -> list[str]:
    """Returns the runs with published checkpoints of another user's session; the rest is private."""
    now = time.time()
    return [
        run.run_id
        for run in store.runs.of_session(session_id)
        if run.owner != reader and store.runs.is_public(run.run_id, now)
    ]


HANDLERS: Mapping[str, Handler] = {
    "client_config": client_config,
    "client_dynamic_config": client_dynamic_config,
    "healthz": healthz,
    "get_server_capabilities": get_server_capabilities,
    "telemetry": telemetry,
    "create_session": create_session,
    "session_heartbeat": session_heartbeat,
    "finish_session": finish_session,
    "assign_session_project": assign_session_project,
    "list_sessions": list_sessions,
    "get_session": get_session,
}
