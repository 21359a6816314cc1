"""The timeline of a session in the Chrome trace format: when its operations were queued, ran and ended.

Open it in https://ui.perfetto.dev or chrome://tracing: one row per run and sampler.
"""

from __future__ import annotations

from typing import Any

from tinkex._wire import json as wire_json
from tinkex.engine.lookup import find_session
from tinkex.engine.store import FinishedRow, Store


def trace_of(store: Store, owner: str, session_id: str) -> bytes:
    """Returns the trace of one session of a user."""
    session = find_session(store, owner, session_id)
    rows = store.finished.of_session(session_id)
    pending = store.futures.pending_of(session_id)
    names = dict.fromkeys([*(row.target for row in rows), *(row.target for row in pending)])
    targets = {target: number for number, target in enumerate(names, 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": session.display_name or session_id}}
    ]
    for target, number in targets.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": target}})
    for row in rows:
        events += _spans(row, targets[row.target])
    for future in pending:
        common = {"cat": future.kind, "id": future.request_id, "pid": 1, "tid": targets[future.target]}
        args = {"request_id": future.request_id, "seq_id": future.seq_id, "pending": True}
        started = _micro(future.created_at)
        events.append({**common, "ph": "b", "name": future.kind, "ts": started, "args": args})
    content = {
        "displayTimeUnit": "ms",
        "otherData": {"session_id": session_id, "sdk_version": session.sdk_version},
        "traceEvents": events,
    }
    return wire_json.encode(content)


def _spans(row: FinishedRow, thread: int) -> list[dict[str, Any]]:
    """Returns asynchronous spans, because samples overlap: the time in the queue, then the time it ran."""
    common = {"cat": row.kind, "id": row.request_id, "pid": 1, "tid": thread}
    args = {
        "request_id": row.request_id,
        "seq_id": row.seq_id,
        "num_tokens": row.num_tokens,
        "tokens_computed": row.tokens_computed,
        "result_bytes": row.num_bytes,
        "succeeded": row.succeeded,
    }
    spans = [("queued", row.accepted_at, row.started_at or row.finished_at)]
    if row.started_at is not None:
        spans.append((row.kind, row.started_at, row.finished_at))
    events: list[dict[str, Any]] = []
    for name, start, stop in spans:
        events.append({**common, "ph": "b", "name": name, "ts": _micro(start), "args": args})
        events.append({**common, "ph": "e", "name": name, "ts": _micro(stop)})
    return events


def _micro(seconds: float) -> int:
    return round(seconds * 1_000_000)
