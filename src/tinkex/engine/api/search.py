"""Searching sessions: all filters must match; pages are sorted newest first.

Of other users' sessions only public data is searched and returned: their existence, owner and published checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.store import SessionRow, Store
from tinkex.types import (
    ActiveSessionStatusQuery,
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishReason,
    ClientSessionFinishSuccess,
    OwnSearchOwner,
    SearchOwner,
    SessionActive,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatusQuery,
    SessionSummary,
    UserSearchOwner,
)

_BATCH = 200

_REASONS: Mapping[str, ClientSessionFinishReason] = {
    "success": ClientSessionFinishSuccess(),
    "errored": ClientSessionFinishErrored(),
    "interrupted": ClientSessionFinishInterrupted(),
}


async def search_sessions(call: Call) -> Reply:
    """Returns the user's sessions that match, optionally with those of others that have published checkpoints."""
    request: SessionSearchRequest = call.request
    store = call.engine.store
    found: list[SessionRow] = []
    for row in _all_sessions(store, call.owner, own=isinstance(request.owner, OwnSearchOwner)):
        if _has_owner(row, request.owner) and _matches(row, request, is_own=row.owner == call.owner):
            found.append(row)
            if len(found) > request.limit:
                break
    page, more = found[: request.limit], len(found) > request.limit
    return SessionSearchResponse(
        sessions=[_summary(store, row, is_own=row.owner == call.owner) for row in page],
        next_cursor=SessionSearchCursor(
            last_created_at=_datetime(page[-1].created_at), last_session_id=page[-1].session_id
        )
        if more
        else None,
    )


def _all_sessions(store: Store, owner: str, *, own: bool) -> Iterator[SessionRow]:
    offset, public_at = 0, None if own else time.time()
    while batch := store.sessions.list(owner, _BATCH, offset, public_at):
        yield from batch
        offset += _BATCH


def _has_owner(row: SessionRow, owner: SearchOwner) -> bool:
    return not isinstance(owner, UserSearchOwner) or row.owner in owner.owner_urns


def _matches(row: SessionRow, request: SessionSearchRequest, *, is_own: bool) -> bool:
    if not is_own:
        # A filter on private fields would reveal their values.
        row = replace(row, user_metadata={}, display_name=None, project_id=None)
        if request.statuses is not None:
            return False
    metadata = row.user_metadata or {}
    return (
        (request.session_id is None or row.session_id == request.session_id)
        and (request.project_ids is None or row.project_id in request.project_ids)
        and (request.display_name is None or request.display_name.lower() in (row.display_name or "").lower())
        and all(metadata.get(name) == value for name, value in request.user_metadata.items())
        and (request.statuses is None or any(_has_status(row, status) for status in request.statuses))
        and (request.cursor is None or _comes_after(row, request.cursor))
    )


def _has_status(row: SessionRow, status: SessionStatusQuery) -> bool:
    if isinstance(status, ActiveSessionStatusQuery):
        return row.finished_at is None
    if isinstance(status, ClientFinishedSessionStatusQuery):
        return row.finished_at is not None and (status.reasons is None or row.finish_reason in status.reasons)
    return False  # this server neither cancels nor fails sessions


def _comes_after(row: SessionRow, cursor: SessionSearchCursor) -> bool:
    created = _datetime(row.created_at)
    return created < cursor.last_created_at or (
        created == cursor.last_created_at and row.session_id > cursor.last_session_id
    )


def _summary(store: Store, row: SessionRow, *, is_own: bool) -> SessionSummary:
    now = time.time()
    checkpoints = [
        checkpoint
        for run in store.runs.of_session(row.session_id)
        for checkpoint in store.checkpoints.of_run(run.run_id, now)
        if is_own or checkpoint.public
    ]
    if not is_own:
        return SessionSummary(
            session_id=row.session_id,
            created_at=_datetime(row.created_at),
            owner=row.owner,
            project_id="",
            checkpoints_count=len(checkpoints),
            checkpoint_storage_bytes=sum(checkpoint.size_bytes for checkpoint in checkpoints),
        )
    return SessionSummary(
        session_id=row.session_id,
        created_at=_datetime(row.created_at),
        owner=row.owner,
        project_id=row.project_id or "",
        status=SessionActive()
        if row.finished_at is None
        else ClientSessionFinished(
            reason=_REASONS.get(row.finish_reason or "", ClientSessionFinishSuccess()),
            detail=row.finish_detail,
        ),
        checkpoints_count=len(checkpoints),
        display_name=row.display_name,
        user_metadata={name: str(value) for name, value in (row.user_metadata or {}).items()} or None,
        checkpoint_storage_bytes=sum(checkpoint.size_bytes for checkpoint in checkpoints),
    )


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


HANDLERS: Mapping[str, Handler] = {"search_sessions": search_sessions}
