"""Training runs and checkpoints: listing; publishing, expiry and deletion of checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.limits import page, wants_accessible
from tinkex.engine.api.pages import rows_from, take_page, text_values
from tinkex.engine.intake.checks import check_ttl
from tinkex.engine.lookup import checkpoint_of_url, find_accessible_run, find_checkpoint, find_run
from tinkex.engine.store import CheckpointKind, CheckpointRow, RunRow, RunStatus, Store
from tinkex.errors import NotAllowed
from tinkex.types import Checkpoint, CheckpointsListResponse, Cursor, TrainingRun, TrainingRunsResponse
from tinkex.types.checkpoints import KINDS

MIN_VERSION_WITH_EXPORTS = (0, 28)
"""The first version of the official client that supports exported weights."""


async def list_training_runs(call: Call) -> Reply:
    """Returns a page of the user's runs, optionally of one project or with published ones of others; last used first."""
    limit, offset = page(call.query, default_limit=20)
    store, owner = call.engine.store, call.owner
    project_id = call.query.get("project_id")
    public_at = time.time() if wants_accessible(call.query) else None

    def read() -> TrainingRunsResponse:
        rows = rows_from(
            lambda limit, offset: store.runs.list(owner, limit, offset, project_id, public_at), limit, offset
        )
        taken, _ = take_page(((row, _training_run(store, owner, row)) for row in rows), limit)
        total = store.runs.count(owner, project_id, public_at)
        return TrainingRunsResponse(
            training_runs=[run for _, run in taken], cursor=_cursor(offset, limit, len(taken), total)
        )

    return await call.run_on_thread(read)


async def get_training_run(call: Call) -> Reply:
    """Returns one run of the user, or one with a published checkpoint."""
    store, run_id = call.engine.store, call.parameters["training_run_id"]
    find = find_accessible_run if wants_accessible(call.query) else find_run
    return _training_run(store, call.owner, find(store, call.owner, run_id))


async def list_checkpoints(call: Call) -> Reply:
    """Returns the live checkpoints of one run, oldest first; of another user's run only public ones."""
    store = call.engine.store
    run = find_accessible_run(store, call.owner, call.parameters["training_run_id"])
    return await call.run_on_thread(
        lambda: CheckpointsListResponse(
            checkpoints=[
                checkpoint_value(row)
                for row in store.checkpoints.of_run(run.run_id, time.time(), _hidden(call))
                if row.public or row.owner == call.owner
            ]
        )
    )


async def list_user_checkpoints(call: Call) -> Reply:
    """Returns a page of the user's live checkpoints of all runs, newest first."""
    limit, offset = page(call.query, default_limit=100)
    checkpoints, now, hidden = call.engine.store.checkpoints, time.time(), _hidden(call)

    def read() -> CheckpointsListResponse:
        rows = rows_from(
            lambda limit, offset: checkpoints.of_owner(call.owner, now, limit, offset, hidden), limit, offset
        )
        taken, _ = take_page(((row, checkpoint_value(row)) for row in rows), limit)
        total = checkpoints.count(call.owner, now, hidden)
        return CheckpointsListResponse(
            checkpoints=[checkpoint for _, checkpoint in taken],
            cursor=_cursor(offset, limit, len(taken), total),
        )

    return await call.run_on_thread(read)


def _cursor(offset: int, limit: int, num_taken: int, total: int) -> Cursor:
    """Returns the cursor of a page; the limit of one that was cut is what it has, so that the next one follows it."""
    is_cut = num_taken < limit and offset + num_taken < total
    return Cursor(offset=offset, limit=num_taken if is_cut else limit, total_count=total)


def _hidden(call: Call) -> str:
    """Returns the checkpoint kind that an old client cannot decode; one entry would make its whole list fail."""
    return CheckpointKind.EXTERNAL_WEIGHTS if call.is_client_before(MIN_VERSION_WITH_EXPORTS) else ""


async def delete_checkpoint(call: Call) -> Reply:
    """Delete a checkpoint and its files. Samplers created from it fail from their next sample on."""
    call.engine.delete_checkpoint(_own_checkpoint(call, "delete it"))
    return None


async def publish_checkpoint(call: Call) -> Reply:
    """Make a checkpoint readable by every user of this server; idempotent."""
    call.engine.store.checkpoints.set_public(_own_checkpoint(call, "publish it"), public=True)
    return None


async def unpublish_checkpoint(call: Call) -> Reply:
    """Make a checkpoint readable only by its owner; idempotent."""
    call.engine.store.checkpoints.set_public(_own_checkpoint(call, "unpublish it"), public=False)
    return None


async def set_checkpoint_ttl(call: Call) -> Reply:
    """Set when a checkpoint expires, in seconds from now; None means never."""
    ttl = call.request.ttl_seconds
    check_ttl(ttl)
    checkpoint = _own_checkpoint(call, "change its expiry")
    call.engine.store.checkpoints.set_expiry(checkpoint, None if ttl is None else time.time() + ttl)
    return None


def _own_checkpoint(call: Call, action: str) -> CheckpointRow:
    path = checkpoint_of_url(call.parameters)
    checkpoint = find_checkpoint(call.engine.store, call.owner, path)
    if checkpoint.owner != call.owner:
        raise NotAllowed(f"{path} is public, but not yours; only its owner can {action}.")
    return checkpoint


def _training_run(store: Store, reader: str, row: RunRow) -> TrainingRun:
    """Returns a run as ``reader`` may see it: only what is public of another user's run."""
    now, is_own = time.time(), row.owner == reader
    last, last_sampler = (
        store.checkpoints.last(row.run_id, kind, now, public_only=not is_own)
        for kind in (CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS)
    )
    return TrainingRun(
        training_run_id=row.run_id,
        base_model=row.base_model,
        model_owner=row.owner,
        is_lora=True,
        last_request_time=_datetime(row.used_at),
        corrupted=row.status is RunStatus.CORRUPTED,
        lora_rank=row.lora.rank if row.lora is not None else None,
        last_checkpoint=checkpoint_value(last) if last is not None else None,
        last_sampler_checkpoint=checkpoint_value(last_sampler) if last_sampler is not None else None,
        user_metadata=text_values(row.user_metadata) if is_own else None,
    )


def checkpoint_value(row: CheckpointRow) -> Checkpoint:
    """Returns a checkpoint as clients see it."""
    return Checkpoint(
        checkpoint_id=row.checkpoint_id,
        checkpoint_type=KINDS[row.kind],
        time=_datetime(row.created_at),
        tinker_path=row.path,
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=text_values(row.user_metadata),
        expires_at=_datetime(row.expires_at) if row.expires_at is not None else None,
        base_model=row.base_model,
    )


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


HANDLERS: Mapping[str, Handler] = {
    "list_training_runs": list_training_runs,
    "get_training_run": get_training_run,
    "list_checkpoints": list_checkpoints,
    "list_user_checkpoints": list_user_checkpoints,
    "delete_checkpoint": delete_checkpoint,
    "publish_checkpoint": publish_checkpoint,
    "unpublish_checkpoint": unpublish_checkpoint,
    "set_checkpoint_ttl": set_checkpoint_ttl,
}
