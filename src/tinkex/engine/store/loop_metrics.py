"""Metrics of training loops by step: those that the server derives from operations, and those that loops log.

Automatic metrics are written in the commit of the optimizer step that they describe, so each step is counted once, also after a
crash. Their step counts the optimizer steps of the run; logged metrics have the step that the loop gave.
"""

# ruff: noqa: S608 -- the statements are made of this module's constants
from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from tinkex.engine.store.database import BATCH_ROWS, Database, Execute
from tinkex.engine.store.metric_series import MetricReader, MetricSource
from tinkex.engine.store.reading import Rows
from tinkex.engine.store.run_changes import RunChanges
from tinkex.errors import InvalidInput

LOSS_SUM = "loss:sum"
"""The sum of the losses of a step's passes."""
LOSS_MEAN = "loss:mean"
"""That sum by the sum of the weights, or by the tokens of the passes if the loss has no weights, or none that add up."""
LOGPROB_GAP = "logprob_gap:mean"
"""The mean of |trainer's logprob − the ``logprobs`` of the datum|, for losses whose datums carry them."""
GRADIENT_NORM = "unclipped_grad_l2:mean"
LEARNING_RATE = "learning_rate:mean"
TOKENS = "num_tokens:sum"
"""The tokens of a step's passes."""
TOKENS_PER_S = "tokens_per_second:mean"
"""Those by the seconds since the step before, or since the first pass started."""

MAX_AUTOMATIC = 64
"""Automatic metrics of one step; further metrics of custom losses are not recorded."""
MAX_NAMES = 1000
"""Names of metrics that one run may log."""
MAX_VALUES = 5_000_000
"""Values of one run: 50 metrics of 100,000 steps."""
MAX_NAME_LENGTH = 200
VALUE_BYTES = 50
NAME_BYTES = 300
"""What a value and a name count for, with their entries in indexes."""


@dataclass(frozen=True)
class PassEnded:
    """A forward and backward pass of a run that succeeded, with the metrics of its result."""

    run_id: str
    owner: str
    num_tokens: int
    num_datums: int
    started_at: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepEnded:
    """An optimizer step of a run that succeeded, with the metrics of its result."""

    run_id: str
    owner: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class GradientCleared:
    """The gradient of a run was discarded: the passes since the last step belong to no step."""

    run_id: str


LoopEvent: TypeAlias = PassEnded | StepEnded | GradientCleared


class _Pending(msgspec.Struct, array_like=True):
    """The passes since the last step."""

    num_tokens: int = 0
    num_datums: int = 0
    started_at: float | None = None
    metrics: dict[str, tuple[float, int]] = msgspec.field(default_factory=dict)
    """Each metric over those passes, with the datums it was averaged over."""


@dataclass
class _Loop:
    """The row of a run."""

    owner: str
    step: int = 0
    tokens: int = 0
    stepped_at: float | None = None
    num_values: int = 0
    metric_bytes: int = 0
    pending: _Pending = field(default_factory=_Pending)


class LoopMetrics(MetricReader):
    """The metrics of all runs. Values are written through the engine's database and read through another connection.

    Example:
        >>> store.loop_metrics.log(run_id, "ada", 20, {"eval/accuracy": 0.75}, time.time())
        >>> store.loop_metrics.names(run_id)
        [MetricKey(name='eval/accuracy', source=<MetricSource.LOGGED: 'logged'>)]
    """

    def __init__(self, database: Database, rows: Rows, changes: RunChanges) -> None:
        super().__init__(rows)
        self._database = database
        self._changes = changes

    # ---- automatic metrics

    def record(self, events: Sequence[LoopEvent], now: float) -> None:
        """Record what operations of runs did, in order; called in the transaction that commits their outcomes.

        Nothing is kept in memory between two calls, so a transaction that is rolled back and repeated counts once. When it is
        committed, call :meth:`RunChanges.notify`.
        """
        with self._database.transaction() as execute:
            for run_id in dict.fromkeys(event.run_id for event in events):
                own = [event for event in events if event.run_id == run_id]
                self._record(execute, run_id, own, now)

    def _record(self, execute: Execute, run_id: str, events: Sequence[LoopEvent], now: float) -> None:
        loop = self._loop(run_id)
        for event in events:
            match event:
                case PassEnded():
                    loop = loop or _Loop(event.owner)
                    _add_pass(loop.pending, event)
                case StepEnded():
                    loop = loop or _Loop(event.owner)
                    pending, loop.pending = loop.pending, _Pending()
                    loop.step += 1
                    loop.tokens += pending.num_tokens
                    values = _automatic(pending, event.metrics, loop.stepped_at, now)
                    loop.stepped_at = now
                    self._write(execute, run_id, loop, MetricSource.AUTOMATIC, loop.step, values, now)
                case GradientCleared():
                    if loop is not None:
                        loop.pending = _Pending()
        if loop is not None:
            self._save(execute, run_id, loop)

    # ---- logged metrics

    def log(self, run_id: str, owner: str, step: int, values: Mapping[str, float], now: float) -> None:
        """Write what a loop logs for a step; a value that the step has already is replaced, so a call can be repeated.

        Raises ``InvalidInput`` if the run would have too many metrics or values.
        """
        with self._database.transaction() as execute:
            loop = self._loop(run_id) or _Loop(owner)
            if loop.num_values + len(values) > MAX_VALUES:
                raise InvalidInput(
                    f"run {run_id} has {loop.num_values} values of metrics, and a run may have {MAX_VALUES}; log fewer metrics, or not "
                    "at every step."
                )
            self._write(execute, run_id, loop, MetricSource.LOGGED, step, values, now)
            self._save(execute, run_id, loop)
        self._changes.notify([run_id])

    # ---- both

    def prune(self) -> int:
        """Delete a batch of the values of runs that no longer exist; returns how many rows, 0 if none are left."""
        with self._database.transaction() as execute:
            gone = self._database.one(
                "SELECT run_id, owner FROM loops WHERE run_id NOT IN (SELECT run_id FROM runs) LIMIT 1"
            )
            if gone is None:
                return 0
            run_id = gone["run_id"]
            of_run = "metric_id IN (SELECT metric_id FROM metrics WHERE run_id = ?)"
            deleted = execute(
                f"DELETE FROM metric_values WHERE (metric_id, step) IN (SELECT metric_id, step FROM metric_values WHERE {of_run} "
                f"LIMIT {BATCH_ROWS})",
                (run_id,),
            )
            if deleted:
                return deleted
            execute("DELETE FROM metrics WHERE run_id = ?", (run_id,))
            return execute("DELETE FROM loops WHERE run_id = ?", (run_id,))

    def _loop(self, run_id: str) -> _Loop | None:
        row = self._database.one("SELECT * FROM loops WHERE run_id = ?", (run_id,))
        if row is None:
            return None
        return _Loop(
            row["owner"],
            row["step"],
            row["tokens"],
            row["stepped_at"],
            row["num_values"],
            row["metric_bytes"],
            _decoder.decode(row["pending"]) if row["pending"] else _Pending(),
        )

    def _save(self, execute: Execute, run_id: str, loop: _Loop) -> None:
        execute(
            "INSERT INTO loops (run_id, owner, step, tokens, stepped_at, num_values, metric_bytes, pending) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET step = excluded.step, tokens = excluded.tokens, "
            "stepped_at = excluded.stepped_at, num_values = excluded.num_values, metric_bytes = excluded.metric_bytes, "
            "pending = excluded.pending",
            (
                run_id,
                loop.owner,
                loop.step,
                loop.tokens,
                loop.stepped_at,
                loop.num_values,
                loop.metric_bytes,
                _encoder.encode(loop.pending) if loop.pending.num_datums else b"",
            ),
        )

    def _write(
        self,
        execute: Execute,
        run_id: str,
        loop: _Loop,
        source: MetricSource,
        step: int,
        values: Mapping[str, float],
        now: float,
    ) -> None:
        ids = self._ids(run_id, source)
        unknown = [name for name in values if name not in ids]
        if unknown:
            if len(ids) + len(unknown) > MAX_NAMES:
                raise InvalidInput(
                    f"run {run_id} logs {len(ids)} metrics, and a run may log {MAX_NAMES}; the name of a metric is the same at every "
                    f"step ({unknown[0]!r} is new)."
                )
            execute.many(
                "INSERT INTO metrics (run_id, source, name) VALUES (?, ?, ?)",
                [(run_id, source, name) for name in unknown],
            )
            ids = self._ids(run_id, source)
            loop.metric_bytes += sum(NAME_BYTES + len(name.encode()) for name in unknown)
        own = [ids[name] for name in values]
        # The next optimizer step is always new.
        num_replaced = self._count(own, step) if source is MetricSource.LOGGED else 0
        execute.many(
            "INSERT OR REPLACE INTO metric_values (metric_id, step, value, at, tokens) VALUES (?, ?, ?, ?, ?)",
            [
                (metric_id, step, value if math.isfinite(value) else None, now, loop.tokens)
                for metric_id, value in zip(own, values.values(), strict=True)
            ],
        )
        loop.num_values += len(own) - num_replaced
        loop.metric_bytes += (len(own) - num_replaced) * VALUE_BYTES

    def _ids(self, run_id: str, source: MetricSource) -> Mapping[str, int]:
        rows = self._database.all(
            "SELECT name, metric_id FROM metrics WHERE run_id = ? AND source = ?", (run_id, source)
        )
        return {row["name"]: row["metric_id"] for row in rows}

    def _count(self, metric_ids: Sequence[int], step: int) -> int:
        row = self._database.one(
            "SELECT count(*) AS total FROM metric_values WHERE step = ? AND metric_id IN (SELECT value FROM json_each(?))",
            (step, json.dumps(metric_ids)),
        )
        return int(row["total"]) if row is not None else 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Pending)
_EXTREMES = {"min": min, "max": max}
_UNKNOWN_REDUCTIONS = frozenset({"unique", "slack", "hash2", "hash_unordered"})
"""What is not a number to draw, or cannot be computed from two values."""


def _add_pass(pending: _Pending, event: PassEnded) -> None:
    """Add a pass: its metrics are combined as clients combine the chunks of one call, by the suffix of their names."""
    for name, value in event.metrics.items():
        reduction = name.rpartition(":")[2]
        if reduction in _UNKNOWN_REDUCTIONS or len(name) > MAX_NAME_LENGTH:
            continue
        if name not in pending.metrics:
            if len(pending.metrics) < MAX_AUTOMATIC:
                pending.metrics[name] = value, event.num_datums
            continue
        before, count = pending.metrics[name]
        total = count + event.num_datums
        if reduction == "sum":
            combined = before + value
        elif reduction in _EXTREMES:
            combined = _EXTREMES[reduction](before, value)
        else:
            combined = (before * count + value * event.num_datums) / (total or 1)
        pending.metrics[name] = combined, total
    pending.num_tokens += event.num_tokens
    pending.num_datums += event.num_datums
    if pending.started_at is None:
        pending.started_at = event.started_at


def _automatic(
    pending: _Pending, of_step: Mapping[str, float], stepped_at: float | None, now: float
) -> Mapping[str, float]:
    """The metrics of a step: those of its passes, those of its result, and what follows from both."""
    values = {name: value for name, (value, _) in pending.metrics.items()}
    loss = values.get(LOSS_SUM)
    divisor = values.get("weights:sum", 0.0)
    divisor = divisor if divisor > 0 else float(pending.num_tokens)
    if loss is not None and divisor:
        values[LOSS_MEAN] = loss / divisor
    values |= {name: value for name, value in of_step.items() if not name.endswith(":unique")}
    since = stepped_at if stepped_at is not None else pending.started_at
    if pending.num_tokens:
        values[TOKENS] = float(pending.num_tokens)
        if since is not None and now > since:
            values[TOKENS_PER_S] = pending.num_tokens / (now - since)
    return values
