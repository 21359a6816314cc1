"""Reading metrics of training loops: which a run has, and one of them over the steps of several runs."""

# ruff: noqa: S608 -- the statements are made of this module's constants
from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tinkex.engine.store.reading import Rows

MAX_STEP = 2**53
"""The last step that every JSON reader can represent."""


class MetricSource(StrEnum):
    """Who wrote a metric."""

    AUTOMATIC = "automatic"
    """The server, for every optimizer step."""
    LOGGED = "logged"
    """The loop."""


class MetricKey(NamedTuple):
    """A metric of a run; the server and the loop may use the same name."""

    name: str
    source: MetricSource = MetricSource.AUTOMATIC


class Point(NamedTuple):
    """One value; ``value`` is None if it is not finite, ``tokens`` are those that the run had trained by then."""

    step: int
    value: float | None
    at: float
    tokens: int


@dataclass(frozen=True)
class Series:
    """The points of one metric of one run in a range of steps, in order."""

    points: Sequence[Point]
    num_values: int
    """How many values the range has."""

    @property
    def is_exact(self) -> bool:
        """Whether every value is there; otherwise the first, the last, and the lowest and highest of each part of the range."""
        return len(self.points) == self.num_values


@dataclass(frozen=True)
class LoopProgress:
    """How far the loop of a run is: its optimizer steps, the tokens it trained, and when its last step ended."""

    step: int
    tokens: int
    stepped_at: float | None


class MetricReader:
    """Reads the metrics of runs; with an ``owner``, only those of that user's runs. Safe on any thread.

    Example:
        >>> with open_reader(data_dir) as reader:
        ...     print(MetricReader(reader).names(run_id, owner="ada"))
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def names(self, run_id: str, owner: str | None = None) -> Sequence[MetricKey]:
        """Returns the metrics of a run, automatic ones first, each kind by name."""
        rows = self._rows.all(
            f"SELECT source, name FROM metrics {_OF_RUNS} ORDER BY source, name",
            (json.dumps([run_id]), owner),
        )
        return [MetricKey(row["name"], MetricSource(row["source"])) for row in rows]

    def series(
        self,
        run_ids: Collection[str],
        key: MetricKey,
        *,
        start: int = 0,
        stop: int = MAX_STEP,
        max_points: int = 1000,
        owner: str | None = None,
    ) -> Mapping[str, Series]:
        """Returns one metric of several runs in the steps from ``start`` to ``stop``, both included; runs without it are left out.

        A series with more than ``max_points`` values keeps the first, the last, the lowest and the highest of each of as many
        equal parts of the range, and one that is not finite, so spikes and gaps survive.

        Example:
            >>> store.loop_metrics.series([run_id], MetricKey("loss:sum"), max_points=600)[run_id].points[-1].value
        """
        rows = self._rows.all(
            f"SELECT run_id, metric_id FROM metrics {_OF_RUNS} AND name = ?3 AND source = ?4",
            (json.dumps([*run_ids]), owner, key.name, key.source),
        )
        return {
            row["run_id"]: self._series(row["metric_id"], start, min(stop, MAX_STEP), max(max_points, 8))
            for row in rows
        }

    def _series(self, metric_id: int, start: int, stop: int, max_points: int) -> Series:
        found = self._rows.one(
            "SELECT count(*) AS num, count(value) AS num_finite, min(step) AS first, max(step) AS last FROM metric_values "
            f"{_IN_RANGE}",
            (metric_id, start, stop),
        )
        if found is None or not found["num"]:
            return Series([], 0)
        num, num_gaps, first, last = (
            found["num"],
            found["num"] - found["num_finite"],
            found["first"],
            found["last"],
        )
        if num <= max_points:
            rows = self._rows.all(
                f"SELECT step, value, at, tokens FROM metric_values {_IN_RANGE} ORDER BY step",
                (metric_id, start, stop),
            )
            return Series([_point(row) for row in rows], num)
        # The ends are two points, and each part has two more, or three with one that is not finite.
        num_parts = (max_points - 2) // (3 if num_gaps else 2)
        width = -(-(last - first + 1) // num_parts)
        rows = self._rows.all(
            f"SELECT step, value, at, tokens FROM metric_values {_IN_RANGE} AND step IN (?2, ?3)",
            (metric_id, first, last),
        )
        kept = [("min(value)", "value IS NOT NULL"), ("max(value)", "value IS NOT NULL")]
        if num_gaps:
            kept.append(("min(step)", "value IS NULL"))
        for chosen, condition in kept:
            # With one min() or max(), SQLite takes the other columns from the row that has it.
            rows = [
                *rows,
                *self._rows.all(
                    f"SELECT step, value, at, tokens, {chosen} FROM metric_values {_IN_RANGE} AND {condition} "
                    "GROUP BY (step - ?2) / ?4",
                    (metric_id, first, last, width),
                ),
            ]
        points = {row["step"]: _point(row) for row in rows}
        return Series([points[step] for step in sorted(points)], num)

    def latest(
        self,
        run_ids: Collection[str],
        names: Collection[str] | None = None,
        owner: str | None = None,
    ) -> Mapping[str, Mapping[MetricKey, Point]]:
        """Returns the value of the last step of each metric, or of those with some names, of runs that have any.

        Example:
            >>> store.loop_metrics.latest([run_id], [LOSS_MEAN])[run_id][MetricKey(LOSS_MEAN)].value
        """
        rows = self._rows.all(
            "SELECT run_id, name, source, step, value, at, tokens FROM metrics JOIN metric_values USING (metric_id) "
            f"{_OF_RUNS} AND (?3 IS NULL OR name IN (SELECT value FROM json_each(?3))) AND step = "
            "(SELECT max(step) FROM metric_values AS others WHERE others.metric_id = metrics.metric_id)",
            (json.dumps([*run_ids]), owner, None if names is None else json.dumps([*names])),
        )
        latest: dict[str, dict[MetricKey, Point]] = {}
        for row in rows:
            latest.setdefault(row["run_id"], {})[_key(row)] = _point(row)
        return latest

    def new_values(
        self, run_id: str, seen: Mapping[MetricKey, int], *, limit: int = 1000, owner: str | None = None
    ) -> Mapping[MetricKey, Sequence[Point]]:
        """Returns the values of a run after the steps that a reader has seen of each metric; at most the last ``limit`` of each.

        For readers that follow the run with :class:`RunChanges`. A value that replaces an earlier step's is not found.
        """
        rows = self._rows.all(
            f"SELECT metric_id, name, source FROM metrics {_OF_RUNS}", (json.dumps([run_id]), owner)
        )
        new: dict[MetricKey, Sequence[Point]] = {}
        for row in rows:
            found = self._rows.all(
                "SELECT step, value, at, tokens FROM metric_values WHERE metric_id = ? AND step > ? ORDER BY step DESC LIMIT ?",
                (row["metric_id"], seen.get(_key(row), -1), limit),
            )
            if found:
                new[_key(row)] = [_point(each) for each in reversed(found)]
        return new

    def progress(self, run_ids: Collection[str], owner: str | None = None) -> Mapping[str, LoopProgress]:
        """Returns how far the loops of runs are; runs that have trained nothing are left out."""
        rows = self._rows.all(
            f"SELECT run_id, step, tokens, stepped_at FROM loops {_OF_RUNS}", (json.dumps([*run_ids]), owner)
        )
        return {row["run_id"]: LoopProgress(row["step"], row["tokens"], row["stepped_at"]) for row in rows}


_OF_RUNS = "WHERE run_id IN (SELECT value FROM json_each(?1)) AND (?2 IS NULL OR run_id IN (SELECT run_id FROM runs WHERE owner = ?2))"
_IN_RANGE = "WHERE metric_id = ?1 AND step BETWEEN ?2 AND ?3"


def _key(row: sqlite3.Row) -> MetricKey:
    return MetricKey(row["name"], MetricSource(row["source"]))


def _point(row: sqlite3.Row) -> Point:
    return Point(row["step"], row["value"], row["at"], row["tokens"])
