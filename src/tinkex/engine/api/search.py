"""Searching sessions and checkpoints: all filters must match; pages are sorted newest first.

Of other users only public data is searched and returned: their published checkpoints, and the existence and owner of
sessions that have some.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.pages import BATCH, take_page, text_values
from tinkex.engine.api.runs import checkpoint_value
from tinkex.engine.store import CheckpointPosition, CheckpointQuery, CheckpointRow, SessionRow, Store
from tinkex.errors import InvalidInput, UnknownObject
from tinkex.types import (
    ActiveSessionStatusQuery,
    CheckpointSearchCursor,
    CheckpointSearchRequest,
    CheckpointSearchResponse,
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
from tinkex.types.checkpoints import KINDS

MAX_NAMES = 100
"""Projects, or base models, in one query."""

_REASONS: Mapping[str, ClientSessionFinishReason] = {
    "success": ClientSessionFinishSuccess(),
    "errored": ClientSessionFinishErrored(),
    "interrupted": ClientSessionFinishInterrupted(),
}


async def search_sessions(call: Call) -> Reply:
    """Returns the user's sessions that match, optionally with those of others that have published checkpoints."""
    # On a thread: it may read all sessions of the user.
    return await call.run_on_thread(partial(_search, call.engine.store, call.owner, call.request))


def _search(store: Store, owner: str, request: SessionSearchRequest) -> SessionSearchResponse:
    rows = (
        (row, _summary(store, row, is_own=row.owner == owner))
        for row in _sessions_after(store, owner, request)
        if _has_owner(row, request.owner) and _matches(row, request, is_own=row.owner == owner)
    )
    page, is_last = take_page(rows, request.limit)
    summaries = [summary for _, summary in page]
    if is_last:
        return SessionSearchResponse(sessions=summaries)
    last = SessionSearchCursor(
        last_created_at=summaries[-1].created_at, last_session_id=summaries[-1].session_id
    )
    return SessionSearchResponse(sessions=summaries, next_cursor=last)


def _sessions_after(store: Store, owner: str, request: SessionSearchRequest) -> Iterator[SessionRow]:
    """Yields the sessions from shortly before the cursor on, whose time is rounded; newest first."""
    after = (math.inf, "")
    if request.cursor is not None:
        after = (request.cursor.last_created_at.timestamp() + 1e-3, "")
    public_at = None if isinstance(request.owner, OwnSearchOwner) else time.time()
    while batch := store.sessions.list_after(owner, BATCH, after, public_at):
        yield from batch
        after = (batch[-1].created_at, batch[-1].session_id)


def _has_owner(row: SessionRow, owner: SearchOwner) -> bool:
    return not isinstance(owner, UserSearchOwner) or row.owner in owner.owner_urns


def _matches(row: SessionRow, request: SessionSearchRequest, *, is_own: bool) -> bool:
    if not is_own:
        # A filter on private fields would reveal their values.
        row = replace(row, user_metadata={}, display_name=None, project_id=None)
        if request.statuses is not None:
            return False
    metadata = text_values(row.user_metadata) or {}
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
        user_metadata=text_values(row.user_metadata) or None,
        checkpoint_storage_bytes=sum(checkpoint.size_bytes for checkpoint in checkpoints),
    )


async def search_checkpoints(call: Call) -> Reply:
    """Returns the user's checkpoints that match, optionally with public ones of others."""
    # On a thread: it may read all checkpoints of the user.
    return await call.run_on_thread(partial(_search_checkpoints, call.engine.store, call.owner, call.request))


def _search_checkpoints(
    store: Store, reader: str, request: CheckpointSearchRequest
) -> CheckpointSearchResponse:
    query = _checkpoint_query(store, reader, request)
    position = None if request.cursor is None else _position(request.cursor)
    rows = (
        (row, checkpoint_value(row))
        for row in _checkpoints_after(store, query, position)
        if request.user_metadata.items() <= (text_values(row.user_metadata) or {}).items()
    )
    page, is_last = take_page(rows, request.limit)
    return CheckpointSearchResponse(
        checkpoints=[checkpoint for _, checkpoint in page],
        next_cursor=None if is_last else _cursor(page[-1][0]),
    )


def _checkpoint_query(store: Store, reader: str, request: CheckpointSearchRequest) -> CheckpointQuery:
    for field in ("project_ids", "base_models"):
        if len(getattr(request, field) or ()) > MAX_NAMES:
            raise InvalidInput(f"{field} has more than {MAX_NAMES} names; search in several steps.")
    for project_id in request.project_ids or ():
        if not store.sessions.has_project(reader, project_id):
            raise UnknownObject(
                f"project_ids has {project_id[:100]!r}, and no session of yours is in that project; leave it out."
            )
    match request.owner:
        case OwnSearchOwner():
            owners: list[str] | None = [reader]
        case UserSearchOwner():
            owners = request.owner.owner_urns
        case _:
            owners = None
    return CheckpointQuery(
        reader=reader,
        owners=owners,
        kind=next((kind for kind, name in KINDS.items() if name == request.checkpoint_type), None),
        base_models=request.base_models,
        project_ids=request.project_ids,
    )


def _checkpoints_after(
    store: Store, query: CheckpointQuery, position: CheckpointPosition | None
) -> Iterator[CheckpointRow]:
    now = time.time()
    while batch := store.checkpoints.search(query, now, BATCH, position):
        yield from batch
        position = _position_of(batch[-1])


def _position_of(row: CheckpointRow) -> CheckpointPosition:
    return CheckpointPosition(row.created_at, row.run_id, row.kind, row.name)


def _cursor(row: CheckpointRow) -> CheckpointSearchCursor:
    """The cursor after a checkpoint. Its time is rounded, so the exact one is part of what identifies the checkpoint."""
    place = "/".join([row.created_at.hex(), *_position_of(row)[1:]])
    return CheckpointSearchCursor(last_created_at=_datetime(row.created_at), last_checkpoint_uuid=place)


def _position(cursor: CheckpointSearchCursor) -> CheckpointPosition:
    parts = cursor.last_checkpoint_uuid.split("/")
    try:
        created_at = float.fromhex(parts[0])
        if len(parts) != 4 or not abs(created_at - cursor.last_created_at.timestamp()) < 1.0:
            raise ValueError(cursor.last_checkpoint_uuid)
    except (ValueError, OverflowError):
        raise InvalidInput("cursor is not one that this server returned; pass it back unchanged.") from None
    return CheckpointPosition(created_at, *parts[1:])


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


HANDLERS: Mapping[str, Handler] = {
    "search_sessions": search_sessions,
    "search_checkpoints": search_checkpoints,
}
