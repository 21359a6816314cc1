"""How much the caller keeps on this server: checkpoints by project."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.store import CheckpointRow, Store
from tinkex.types import CurrentCheckpointStorageUsageItem, CurrentCheckpointStorageUsageResponse

_BATCH = 500
_GIGABYTE = 1e9


async def checkpoint_storage_usage(call: Call) -> Reply:
    """Number and size of the caller's live checkpoints per project; nobody is billed, so there is no rate."""
    store = call.engine.store
    wanted = call.query.get("project_id")
    projects: dict[str, str | None] = {}
    kept: dict[str | None, tuple[int, int]] = {}
    for checkpoint in _checkpoints(store, call.owner):
        run_id = checkpoint.run_id
        if run_id not in projects:
            projects[run_id] = _project(store, run_id)
        count, size = kept.get(projects[run_id], (0, 0))
        kept[projects[run_id]] = (count + 1, size + checkpoint.size_bytes)
    return CurrentCheckpointStorageUsageResponse(
        data=[
            CurrentCheckpointStorageUsageItem(
                project_id=project,
                org_user_urn=call.owner,
                checkpoint_count=count,
                size_bytes=size,
                size_gigabytes=size / _GIGABYTE,
            )
            for project, (count, size) in sorted(kept.items(), key=lambda item: item[0] or "")
            if wanted is None or project == wanted
        ]
    )


def _checkpoints(store: Store, owner: str) -> Iterator[CheckpointRow]:
    now, offset = time.time(), 0
    while batch := store.checkpoints.of_owner(owner, now, _BATCH, offset):
        yield from batch
        offset += len(batch)


def _project(store: Store, run_id: str) -> str | None:
    run = store.runs.get(run_id)
    session = store.sessions.get(run.session_id) if run is not None else None
    return session.project_id if session is not None else None


HANDLERS: Mapping[str, Handler] = {"checkpoint_storage_usage": checkpoint_storage_usage}
