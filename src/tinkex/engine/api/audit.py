"""The audit log: which requests are recorded, and the endpoint that returns the entries."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from starlette.requests import Request

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.engine import Engine
from tinkex.engine.lookup import checkpoint_of_url
from tinkex.engine.quotas import Quotas
from tinkex.engine.store import LOCAL_USER, AuditRow, Store
from tinkex.errors import InvalidInput
from tinkex.types import AuditLogEntry, AuditLogResponse

logger = logging.getLogger("tinkex.engine")

SUBJECT = "audit"
CATEGORIES = ("checkpoints", "projects", "teams", "organizations")
MAX_ENTRIES = 10_000
MAX_FIELD_CHARS = 512
"""Longer values of an entry are cut."""
INTERVAL_S = 60.0
MAX_FAILED_LOGINS = 20
"""Entries per interval for requests without a valid key; the others are counted in one further entry."""
MAX_ENTRIES_WITHOUT_ROOM = 20
"""The same for each kind of request of a user who may store nothing more."""


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
    "external_weights_upload_start": Audited(
        "checkpoint_upload_start", "checkpoints", lambda call: call.audit_details
    ),
    "external_weights_upload_finish": Audited(
        "checkpoint_create", "checkpoints", lambda call: call.audit_details
    ),
    "external_weights_upload_cancel": Audited(
        "checkpoint_upload_cancel", "checkpoints", lambda call: {"upload_id": call.request.upload_id}
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


class AuditedCalls:
    """Records successful requests.

    A user who may store nothing more cannot fill the log by requests that store nothing else: per interval, at most
    ``max_entries`` of each kind are recorded, and at its end the number of the others.
    """

    def __init__(self, interval_s: float = INTERVAL_S, max_entries: int = MAX_ENTRIES_WITHOUT_ROOM) -> None:
        self._interval_s, self._max_entries = interval_s, max_entries
        self._without_room: Counter[tuple[str, Audited]] = Counter()
        self._ends_at = 0.0

    def record(self, endpoint: str, call: Call) -> None:
        """Add an entry for a request, if its endpoint is audited; on the event loop."""
        audited = AUDITED.get(endpoint)
        if audited is None or not self._is_listed(call, audited):
            return
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

    def _is_listed(self, call: Call, audited: Audited) -> bool:
        """Whether a request has an entry of its own."""
        if Quotas(call.engine.config, call.engine.store).has_room(call.owner):
            return True
        if time.monotonic() >= self._ends_at:
            self._end_interval(call.engine)
            self._ends_at = time.monotonic() + self._interval_s
            # The number is recorded even if no further request comes.
            asyncio.get_running_loop().call_later(self._interval_s, self._end_interval, call.engine)
        self._without_room[call.owner, audited] += 1
        return self._without_room[call.owner, audited] <= self._max_entries

    def _end_interval(self, engine: Engine) -> None:
        counts, self._without_room = self._without_room, Counter()
        for (owner, audited), count in counts.items():
            if count > self._max_entries and not engine.closed:
                further = {"further_requests": count - self._max_entries, "seconds": self._interval_s}
                details = {"user": owner, **further}
                _add(engine, AuditRow(owner, time.time(), audited.category, audited.event, details=details))


def _add(engine: Engine, row: AuditRow) -> None:
    """Add an entry; a failure is logged and reported in health, and the request succeeds."""
    try:
        engine.store.audit.add(
            replace(
                row,
                model_id=_cut(row.model_id),
                tinker_path=_cut(row.tinker_path),
                details={name: _cut(value) for name, value in row.details.items()},
            )
        )
        engine.health.fine(SUBJECT)
    except sqlite3.Error as error:
        logger.warning("%s of %s is not in the audit log: %s", row.event, row.owner, error)
        engine.health.trouble(SUBJECT, f"the audit log cannot be written ({error})")


def _cut(value: Any) -> Any:
    """Returns a value in at most ``MAX_FIELD_CHARS`` characters.

    >>> len(_cut("/" * 100_000)), _cut(7), _cut(None)
    (512, 7, None)
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= MAX_FIELD_CHARS:
        return value
    return f"{text[: MAX_FIELD_CHARS - 1]}…"


class FailedLogins:
    """Records requests without a valid key, so that no client can fill the log.

    Per interval: one entry for a host, at most ``max_entries`` of them, and at its end one entry with the number of
    requests that have none of their own.
    """

    def __init__(self, interval_s: float = INTERVAL_S, max_entries: int = MAX_FAILED_LOGINS) -> None:
        self._interval_s, self._max_entries = interval_s, max_entries
        self._hosts: set[str] = set()
        self._num_dropped = 0
        self._ends_at = 0.0

    def record(self, engine: Engine, request: Request) -> None:
        """Record a request that was rejected with 401; on the event loop."""
        if time.monotonic() >= self._ends_at:
            self._end_interval(engine)
            self._ends_at = time.monotonic() + self._interval_s
            # The number is recorded even if no further request comes.
            asyncio.get_running_loop().call_later(self._interval_s, self._end_interval, engine)
        host = request.client.host if request.client is not None else "local"
        if host in self._hosts or len(self._hosts) >= self._max_entries:
            self._num_dropped += 1
            return
        self._hosts.add(host)
        _add_failed_logins(engine, "login_refused", {"host": host, "path": request.url.path})

    def _end_interval(self, engine: Engine) -> None:
        num_dropped, self._num_dropped = self._num_dropped, 0
        self._hosts.clear()
        if num_dropped and not engine.closed:
            _add_failed_logins(
                engine, "logins_refused", {"further_requests": num_dropped, "seconds": self._interval_s}
            )


def _add_failed_logins(engine: Engine, event: str, details: Mapping[str, Any]) -> None:
    _add(engine, AuditRow(LOCAL_USER, time.time(), "organizations", event, details=details))


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
    return await call.run_on_thread(
        lambda: _entries(call.engine.store, call.owner, start, None if category == "all" else category)
    )


def _entries(store: Store, owner: str, start: datetime, category: str | None) -> AuditLogResponse:
    rows = store.audit.between(
        None if owner == LOCAL_USER else owner,
        start.timestamp(),
        (start + timedelta(days=1)).timestamp(),
        category,
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
