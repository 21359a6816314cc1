"""Copies of checkpoints: a new run without live weights, with files shared with the original."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
import uuid
from dataclasses import replace
from pathlib import Path

from tinkex.engine.intake.checks import check_ttl
from tinkex.engine.lookup import find_session
from tinkex.engine.quotas import Quotas
from tinkex.engine.store import CheckpointRow, RunRow, RunStatus, SessionRow, Store
from tinkex.errors import InvalidInput, UnknownObject
from tinkex.types import CopyWeightsRequest


def copy_checkpoint(
    store: Store,
    quotas: Quotas,
    owner: str,
    source: CheckpointRow,
    request: CopyWeightsRequest,
    idempotency_key: str | None,
) -> CheckpointRow:
    """Copy a checkpoint for a user; a repeated idempotency key returns the first copy."""
    check_ttl(request.ttl_seconds)
    existing = store.copies.find(owner, idempotency_key) if idempotency_key is not None else None
    if existing is not None:
        return existing
    now = time.time()
    session, run_id = _find_target(store, owner, request, now)
    with store.directories.checkpoint(run_id, source.kind, source.name) as writing:
        _link_files(store.directories.resolve(source.directory), writing.temporary)
    run = RunRow(
        run_id=run_id,
        session_id=session.session_id,
        owner=owner,
        base_model=source.base_model,
        created_at=now,
        used_at=now,
        status=RunStatus.RELEASED,
        lora=source.lora,
        optimizer_config=source.optimizer_config,
        user_metadata={"copied_from": source.path},
    )
    copy = replace(
        source,
        run_id=run_id,
        owner=owner,
        created_at=now,
        directory=writing.final,
        expires_at=now + request.ttl_seconds if request.ttl_seconds is not None else None,
        public=False,
    )
    try:
        with store.database.transaction():
            # Again in the transaction: other copies may have been made since.
            quotas.check_room(owner, copy.size_bytes)
            if store.sessions.get(session.session_id) is None:
                store.sessions.add(session)
                store.sessions.finish(session.session_id, now, "success", None)
            store.runs.add(run)
            store.checkpoints.put(copy)
            if idempotency_key is not None:
                store.copies.add(copy, idempotency_key)
    except sqlite3.IntegrityError:
        # A concurrent request with the same key or run committed first.
        store.directories.remove(copy.directory)
        existing = store.copies.find(owner, idempotency_key) if idempotency_key is not None else None
        if existing is None:
            raise InvalidInput(f"{run_id} is already in use; choose another model_seq_id.") from None
        return existing
    except BaseException:
        store.directories.remove(copy.directory)
        raise
    return copy


def _find_target(store: Store, owner: str, request: CopyWeightsRequest, now: float) -> tuple[SessionRow, str]:
    """Returns the session and run of the copy: those in the request, or new ones in the project."""
    if request.session_id is not None:
        if request.model_seq_id is None:
            raise InvalidInput("copy_weights with a session_id needs a model_seq_id as well.")
        session = find_session(store, owner, request.session_id)
        run_id = f"{session.session_id}:train:{request.model_seq_id}"
        if store.runs.get(run_id) is not None:
            raise InvalidInput(f"model_seq_id {request.model_seq_id} of this session is already in use.")
        return session, run_id
    session = SessionRow(
        session_id=str(uuid.uuid4()),
        owner=owner,
        created_at=now,
        seen_at=now,
        project_id=request.destination_project_id,
        display_name=f"copy of {request.source_path}",
    )
    return session, f"{session.session_id}:train:0"


def _link_files(source: Path, target: Path) -> None:
    """Hard-link the files, or copy them where the file system has no hard links."""
    try:
        for file in sorted(source.iterdir()):
            try:
                os.link(file, target / file.name)
            except OSError:
                shutil.copy2(file, target / file.name)
    except FileNotFoundError:
        raise UnknownObject("the checkpoint was deleted while it was being copied.") from None
