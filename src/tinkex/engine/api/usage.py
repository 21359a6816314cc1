"""Usage of the user: tokens and checkpoints per hour, storage per project."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.pages import text_values
from tinkex.engine.store import HOUR_S, CheckpointRow, SessionRow, Store, UsageKey, UsageKind
from tinkex.errors import InvalidInput
from tinkex.types import (
    BillingEventInfo,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CheckpointBillingEvent,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    StorageBillingEvent,
    TrainingBillingEvent,
)

_BATCH = 500
_GIGABYTE = 1e9
MIN_VERSION_WITH_FREE_STORAGE = (0, 31)
"""Older official clients reject a storage event with the field ``free``; 0.38 reads it, and those between ignore it."""
WITHOUT_TOKENS = frozenset({UsageKind.CHECKPOINT, UsageKind.STORAGE})


async def checkpoint_storage_usage(call: Call) -> Reply:
    """Returns number and size of the user's live checkpoints per project; there is no billing, so there is no rate."""
    return await call.run_on_thread(
        lambda: _storage_usage(call.engine.store, call.owner, call.query.get("project_id"))
    )


def _storage_usage(
    store: Store, owner: str, only_project: str | None
) -> CurrentCheckpointStorageUsageResponse:
    projects: dict[str, str | None] = {}
    totals: dict[str | None, tuple[int, int]] = {}
    for checkpoint in _checkpoints(store, owner):
        run_id = checkpoint.run_id
        if run_id not in projects:
            projects[run_id] = _project(store, run_id)
        count, size = totals.get(projects[run_id], (0, 0))
        totals[projects[run_id]] = (count + 1, size + checkpoint.size_bytes)
    return CurrentCheckpointStorageUsageResponse(
        data=[
            CurrentCheckpointStorageUsageItem(
                project_id=project,
                org_user_urn=owner,
                checkpoint_count=count,
                size_bytes=size,
                size_gigabytes=size / _GIGABYTE,
            )
            for project, (count, size) in sorted(totals.items(), key=lambda item: item[0] or "")
            if only_project is None or project == only_project
        ]
    )


async def billing_usage(call: Call) -> Reply:
    """Returns the user's usage in a range of whole hours; there is no billing, so every price is zero."""
    start, stop = _hour(call.query, "starting_on"), _hour(call.query, "ending_before")
    if start >= stop:
        raise InvalidInput("starting_on must be before ending_before, by at least one hour.")
    shows_free = not call.is_client_before(MIN_VERSION_WITH_FREE_STORAGE)
    return await call.run_on_thread(
        lambda: _billing_usage(call.engine.store, call.owner, start, stop, shows_free)
    )


def _billing_usage(
    store: Store, owner: str, start: datetime, stop: datetime, shows_free: bool
) -> BillingUsageResponse:
    used = [
        (key, amount)
        for key, amount in store.usage.between(owner, start.timestamp(), stop.timestamp())
        if key.kind
        is not UsageKind.TRAINING_COMPUTED  # of interest to the operator, not to who pays for tokens sent
    ]
    sessions = {key.session_id: store.sessions.get(key.session_id) for key, _ in used}
    return BillingUsageResponse(
        data=[_event(key, amount, sessions[key.session_id], shows_free) for key, amount in used],
        sessions={
            name: BillingUsageSession(user_metadata=text_values(row.user_metadata) or None)
            for name, row in sessions.items()
            if row is not None
        },
        cost_data_through=stop,
    )


def _event(key: UsageKey, amount: int, session: SessionRow | None, shows_free: bool) -> BillingUsageEvent:
    start = datetime.fromtimestamp(key.hour, UTC)
    return BillingUsageEvent(
        bucket_start=start,
        bucket_end=start + timedelta(seconds=HOUR_S),
        base_model=key.base_model,
        user_id=key.owner,
        user_name=key.owner,
        session_id=key.session_id or None,
        project_id=session.project_id if session is not None else None,
        estimated_cost_usd=0.0,
        effective_rate_usd_per_million_tokens=None if key.kind in WITHOUT_TOKENS else 0.0,
        effective_rate_usd_per_gigabyte_month=0.0 if key.kind is UsageKind.STORAGE else None,
        event_info=_info(key.kind, amount, shows_free),
    )


def _info(kind: UsageKind, amount: int, shows_free: bool) -> BillingEventInfo:
    match kind:
        case UsageKind.TRAINING | UsageKind.TRAINING_COMPUTED:
            return TrainingBillingEvent(token_count=amount)
        case UsageKind.SAMPLE:
            return SamplingSampleBillingEvent(token_count=amount)
        case UsageKind.CHECKPOINT:
            return CheckpointBillingEvent(count=amount)
        case UsageKind.STORAGE:
            return StorageBillingEvent(
                free=True if shows_free else None, gigabyte_hours=amount / _GIGABYTE / HOUR_S
            )
        case UsageKind.PREFILL | UsageKind.PREFILL_CACHED:
            return SamplingPrefillBillingEvent(cached=kind is UsageKind.PREFILL_CACHED, token_count=amount)


def _hour(query: Mapping[str, str], name: str) -> datetime:
    try:
        moment = datetime.fromisoformat(query[name])
    except (KeyError, ValueError):
        raise InvalidInput(
            f"{name} is {query.get(name)!r}; use an ISO 8601 time such as 2026-07-13T00:00:00Z."
        ) from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    if moment.timestamp() % HOUR_S:
        raise InvalidInput(f"{name} is {query[name]}; it must be a full hour in UTC.")
    return moment


def _checkpoints(store: Store, owner: str) -> Iterator[CheckpointRow]:
    now, offset = time.time(), 0
    while batch := store.checkpoints.of_owner(owner, now, _BATCH, offset):
        yield from batch
        offset += len(batch)


def _project(store: Store, run_id: str) -> str | None:
    run = store.runs.get(run_id)
    session = store.sessions.get(run.session_id) if run is not None else None
    return session.project_id if session is not None else None


HANDLERS: Mapping[str, Handler] = {
    "billing_usage": billing_usage,
    "checkpoint_storage_usage": checkpoint_storage_usage,
}
