"""Finding sessions: every filter of the question must fit, newest first, page by page.

Of sessions of others only that is told, and looked at, which is public: that they exist, whose they are, and their
published checkpoints.
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
    """The caller's sessions that fit, or also those of others with published checkpoints."""
    asked: SessionSearchRequest = call.request
    store = call.engine.store
    found: list[SessionRow] = []
    for row in _all_sessions(store, call.owner, own=isinstance(asked.owner, OwnSearchOwner)):
        if _of(row, asked.owner) and _fits(row, asked, is_own=row.owner == call.owner):
            found.append(row)
            if len(found) > asked.limit:
                break
    page, more = found[: asked.limit], len(found) > asked.limit
    return SessionSearchResponse(
        sessions=[_summary(store, row, is_own=row.owner == call.owner) for row in page],
        next_cursor=SessionSearchCursor(
            last_created_at=_moment(page[-1].created_at), last_session_id=page[-1].session_id
        )
        if more
        else None,
    )


def _all_sessions(store: Store, owner: str, *, own: bool) -> Iterator[SessionRow]:
    offset, public_at = 0, None if own else time.time()
    while batch := store.sessions.list(owner, _BATCH, offset, public_at):
        yield from batch
        offset += _BATCH


def _of(row: SessionRow, owner: SearchOwner) -> bool:
    return not isinstance(owner, UserSearchOwner) or row.owner in owner.owner_urns


def _fits(row: SessionRow, asked: SessionSearchRequest, *, is_own: bool) -> bool:
    if not is_own:
        # Whether a guess fits what is not public would tell it.
        row = replace(row, user_metadata={}, display_name=None, project_id=None)
        if asked.statuses is not None:
            return False
    metadata = row.user_metadata or {}
    return (
        (asked.session_id is None or row.session_id == asked.session_id)
        and (asked.project_ids is None or row.project_id in asked.project_ids)
        and (asked.display_name is None or asked.display_name.lower() in (row.display_name or "").lower())
        and all(metadata.get(name) == value for name, value in asked.user_metadata.items())
        and (asked.statuses is None or any(_has_status(row, status) for status in asked.statuses))
        and (asked.cursor is None or _comes_after(row, asked.cursor))
    )


def _has_status(row: SessionRow, status: SessionStatusQuery) -> bool:
    if isinstance(status, ActiveSessionStatusQuery):
        return row.finished_at is None
    if isinstance(status, ClientFinishedSessionStatusQuery):
        return row.finished_at is not None and (status.reasons is None or row.finish_reason in status.reasons)
    return False  # sessions are neither cancelled nor failed here


def _comes_after(row: SessionRow, cursor: SessionSearchCursor) -> bool:
    created = _moment(row.created_at)
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
            created_at=_moment(row.created_at),
            owner=row.owner,
            project_id="",
            checkpoints_count=len(checkpoints),
            checkpoint_storage_bytes=sum(checkpoint.size_bytes for checkpoint in checkpoints),
        )
    return SessionSummary(
        session_id=row.session_id,
        created_at=_moment(row.created_at),
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


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


HANDLERS: Mapping[str, Handler] = {"search_sessions": search_sessions}
