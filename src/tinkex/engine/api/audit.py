"""The audit log: which calls are written down, how, and who may read it."""

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
MOST_ENTRIES = 10_000
REFUSALS_INTERVAL_S = 60.0


@dataclass(frozen=True)
class Audited:
    """How a call is written down: the event, the category it is found under, and what it was about."""

    event: str
    category: str
    details: Callable[[Call], Mapping[str, Any]] = field(default=lambda _call: {})


def _session(call: Call) -> Mapping[str, Any]:
    return {"session_id": call.parameters["session_id"]}


def _run(call: Call) -> Mapping[str, Any]:
    return {"session_id": call.request.session_id, "base_model": call.request.base_model}


def _saved(kind: str) -> Callable[[Call], Mapping[str, Any]]:
    def details(call: Call) -> Mapping[str, Any]:
        run, name = call.request.model_id, call.request.path
        return (
            {"model_id": run, "tinker_path": f"tinker://{run}/{kind}/{name}"} if name else {"model_id": run}
        )

    return details


def _loaded(call: Call) -> Mapping[str, Any]:
    return {"model_id": call.request.model_id, "tinker_path": call.request.path, "purpose": "load"}


def _checkpoint(purpose: str | None = None) -> Callable[[Call], Mapping[str, Any]]:
    def details(call: Call) -> Mapping[str, Any]:
        about = {
            "model_id": call.parameters["training_run_id"],
            "tinker_path": checkpoint_of_url(call.parameters),
        }
        return {**about, "purpose": purpose} if purpose is not None else about

    return details


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
    "upload_assets": Audited("asset_create", "assets", lambda call: call.about),
    "delete_asset": Audited("asset_delete", "assets", lambda call: {"asset_id": call.parameters["asset_id"]}),
    "auth_token": Audited("token_create", "organizations"),
}
"""The calls that are written down when they were granted; submissions when they were accepted."""


def write_down(name: str, call: Call) -> None:
    """Note a call that was granted."""
    audited = AUDITED.get(name)
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
    """Write an entry; what was granted stays granted if that cannot be written down."""
    try:
        engine.store.audit.add(row)
        engine.health.fine(SUBJECT)
    except sqlite3.Error as error:
        logger.warning("%s of %s is not in the audit log: %s", row.event, row.owner, error)
        engine.health.trouble(SUBJECT, f"the audit log cannot be written ({error})")


class Refusals:
    """Notes calls without a known key: once a minute for each host, so that nobody can fill the log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[str, float] = {}

    def note(self, engine: Engine, request: Request) -> None:
        """Note a refused call."""
        host = request.client.host if request.client is not None else "local"
        now = time.monotonic()
        with self._lock:
            self._noted = {h: at for h, at in self._noted.items() if now - at < REFUSALS_INTERVAL_S}
            if host in self._noted:
                return
            self._noted[host] = now
        details = {"host": host, "path": request.url.path}
        _add(engine, AuditRow(LOCAL_USER, time.time(), "organizations", "login_refused", details=details))


async def audit_log(call: Call) -> Reply:
    """What the caller did on a day (UTC); the server's own user sees what everybody did."""
    wanted = call.query.get("event_type", "all")
    if wanted not in {"all", *CATEGORIES}:
        raise InvalidInput(f"event_type is {wanted!r}; ask for all, or for {', '.join(CATEGORIES)}.")
    try:
        day = date.fromisoformat(call.query["day"]) if "day" in call.query else datetime.now(UTC).date()
    except ValueError:
        raise InvalidInput(f"day is {call.query['day']!r}; give it as YYYY-MM-DD.") from None
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    rows = call.engine.store.audit.between(
        None if call.owner == LOCAL_USER else call.owner,
        start.timestamp(),
        (start + timedelta(days=1)).timestamp(),
        None if wanted == "all" else wanted,
        MOST_ENTRIES,
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
