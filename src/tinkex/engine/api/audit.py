"""The audit log: which requests are recorded, and the endpoint that returns the entries."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any

from starlette.requests import Request

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.engine import Engine
from tinkex.engine.lookup import checkpoint_of_url
from tinkex.engine.store import LOCAL_USER, AuditRow
from tinkex.errors import InvalidInput
from tinkex.types import AuditLogEntry, AuditLogResponse

logger = logging.getLogger("tinkex.engine")

SUBJECT = "audit"
CATEGORIES = ("checkpoints", "projects", "teams", "organizations")
MAX_ENTRIES = 10_000
FAILED_LOGIN_INTERVAL_S = 60.0


@dataclass(frozen=True)
class Audited:
    """How requests of an endpoint are recorded: event, category and details."""

    event: str
    category: str
    details: Callable[[Call], Mapping[str, Any]] = field(default=lambda _call: {})


def _session(call: Call) -> Mapping[str, Any]:
    return {"session_id": call.parameters["session_id"]}


def _run(call: Call) -> Mapping[str, Any]:
    return {"session_id": call.request.session_id, "base_model": call.request.base_model}


def _saved(kind: str) -> Callable[[Call], Mapping[str, Any]]:
    def build(call: Call) -> Mapping[str, Any]:
        run, name = call.request.model_id, call.request.path
        return (
            {"model_id": run, "tinker_path": f"tinker://{run}/{kind}/{name}"} if name else {"model_id": run}
        )

    return build


def _loaded(call: Call) -> Mapping[str, Any]:
    return {"model_id": call.request.model_id, "tinker_path": call.request.path, "purpose": "load"}


def _checkpoint(purpose: str | None = None) -> Callable[[Call], Mapping[str, Any]]:
    def build(call: Call) -> Mapping[str, Any]:
        details = {
            "model_id": call.parameters["training_run_id"],
            "tinker_path": checkpoint_of_url(call.parameters),
        }
        return {**details, "purpose": purpose} if purpose is not None else details

    return build


AUDITED: Mapping[str, Audited] = {
    "create_session": Audited(
        "session_create", "sessions", lambda call: {"project_id": call.request.project_id}
    ),
    "finish_session": Audited("session_finish", "sessions", _session),
    "assign_session_project": Audited(
        "project_session_assign",
        "projects",
        lambda call: {**_session(call), "project_id": call.request.project_id},
    ),
    "export_session_trace": Audited("session_trace_export", "sessions", _session),
    "create_model": Audited("run_create", "runs", _run),
    "unload_model": Audited("run_unload", "runs", lambda call: {"model_id": call.request.model_id}),
    "save_weights": Audited("checkpoint_create", "checkpoints", _saved("weights")),
    "save_weights_for_sampler": Audited("checkpoint_create", "checkpoints", _saved("sampler_weights")),
    "save_weights_external": Audited("checkpoint_create", "checkpoints", _saved("external_weights")),
    "load_weights": Audited("checkpoint_read", "checkpoints", _loaded),
    "copy_weights": Audited(
        "checkpoint_copy",
        "checkpoints",
        lambda call: {"tinker_path": call.request.source_path, "purpose": "copy"},
    ),
    "delete_checkpoint": Audited("checkpoint_delete", "checkpoints", _checkpoint()),
    "publish_checkpoint": Audited("checkpoint_publish", "checkpoints", _checkpoint()),
    "unpublish_checkpoint": Audited("checkpoint_unpublish", "checkpoints", _checkpoint()),
    "set_checkpoint_ttl": Audited("checkpoint_ttl_set", "checkpoints", _checkpoint()),
    "checkpoint_archive": Audited("checkpoint_read", "checkpoints", _checkpoint("archive")),
    "external_weights_urls": Audited("checkpoint_read", "checkpoints", _checkpoint("download")),
    "upload_assets": Audited("asset_create", "assets", lambda call: call.audit_details),
    "delete_asset": Audited("asset_delete", "assets", lambda call: {"asset_id": call.parameters["asset_id"]}),
    "auth_token": Audited("token_create", "organizations"),
}
"""The endpoints whose successful requests are recorded; submissions are recorded when they are accepted."""


def record(endpoint: str, call: Call) -> None:
    """Add an entry for a successful request, if its endpoint is audited."""
    audited = AUDITED.get(endpoint)
    if audited is not None:
        details = audited.details(call)
        _add(
            call.engine,
            AuditRow(
                owner=call.owner,
                at=time.time(),
                category=audited.category,
                event=audited.event,
                model_id=details.get("model_id") if audited.category == "checkpoints" else None,
                tinker_path=details.get("tinker_path"),
                details={
                    "user": call.owner,
                    **{name: value for name, value in details.items() if value is not None},
                },
            ),
        )


def _add(engine: Engine, row: AuditRow) -> None:
    """Add an entry; a failure is logged and reported in health, and the request succeeds."""
    try:
        engine.store.audit.add(row)
        engine.health.fine(SUBJECT)
    except sqlite3.Error as error:
        logger.warning("%s of %s is not in the audit log: %s", row.event, row.owner, error)
        engine.health.trouble(SUBJECT, f"the audit log cannot be written ({error})")


class FailedLogins:
    """Records requests without a valid key, at most once a minute per host so that no client can flood the log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recorded: dict[str, float] = {}

    def record(self, engine: Engine, request: Request) -> None:
        """Record a request that was rejected with 401."""
        host = request.client.host if request.client is not None else "local"
        now = time.monotonic()
        with self._lock:
            self._recorded = {h: at for h, at in self._recorded.items() if now - at < FAILED_LOGIN_INTERVAL_S}
            if host in self._recorded:
                return
            self._recorded[host] = now
        details = {"host": host, "path": request.url.path}
        _add(engine, AuditRow(LOCAL_USER, time.time(), "organizations", "login_refused", details=details))


async def audit_log(call: Call) -> Reply:
    """Returns the user's entries of one day (UTC); the server's own user gets the entries of all users."""
    category = call.query.get("event_type", "all")
    if category not in {"all", *CATEGORIES}:
        raise InvalidInput(f"event_type is {category!r}; use one of: all, {', '.join(CATEGORIES)}.")
    try:
        day = date.fromisoformat(call.query["day"]) if "day" in call.query else datetime.now(UTC).date()
    except ValueError:
        raise InvalidInput(f"day is {call.query['day']!r}; use the format YYYY-MM-DD.") from None
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    rows = call.engine.store.audit.between(
        None if call.owner == LOCAL_USER else call.owner,
        start.timestamp(),
        (start + timedelta(days=1)).timestamp(),
        None if category == "all" else category,
        MAX_ENTRIES,
    )
    return AuditLogResponse(
        entries=[
            AuditLogEntry(
                timestamp=datetime.fromtimestamp(row.at, UTC),
                event=row.event,
                event_details=dict(row.details),
                model_id=row.model_id,
                tinker_path=row.tinker_path,
                purpose=row.details.get("purpose"),
            )
            for row in rows
        ]
    )


HANDLERS: Mapping[str, Handler] = {"audit_log": audit_log}
