"""Metrics of a client: counters, gauges and histograms, fed by its events.

>>> from tinkex.observability.events import RequestFinished
>>> sink = MetricsSink()
>>> sink.emit(RequestFinished("healthz", 0, 200, 0.012))
>>> sink.metrics.snapshot().counters['tinkex_requests_total{endpoint="healthz",outcome="ok"}']
1.0
"""

from __future__ import annotations

import functools
import math
import re
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from tinkex.observability.events import (
    CircuitChanged,
    LogSink,
    QueueStateChanged,
    RequestFinished,
    RequestStarted,
    RetryScheduled,
    SamplingPaused,
    StreamingUnavailable,
)

if TYPE_CHECKING:
    from tinkex.observability.events import Event, Sink

__all__ = ["HistogramSummary", "Metrics", "MetricsSink", "Snapshot"]

WINDOW = 1000
"""Percentiles cover this many latest observations; count, mean, min and max cover all."""
BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
MAX_SERIES = 1000
"""Further combinations of name and labels are dropped, so that a high-cardinality label cannot exhaust memory."""


BUILTIN_KINDS = {"tinkex_requests_total": "counter", "tinkex_request_duration_ms": "histogram"}
"""Metrics of every client, which ``count_request`` updates without checking names."""
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class HistogramSummary:
    """Summary of the observations of one series."""

    count: int
    mean: float
    min: float
    max: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Snapshot:
    """All metrics at one moment, by name and labels."""

    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, HistogramSummary] = field(default_factory=dict)
    dropped_series: int = 0


class _Histogram:
    __slots__ = ("buckets", "count", "max", "min", "total", "window")

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self.min, self.max = math.inf, -math.inf
        self.window: deque[float] = deque(maxlen=WINDOW)
        self.buckets = [0] * (len(BUCKETS) + 1)
        """Non-cumulative counts; the last one is for values above every bound."""

    def observe(self, value: float) -> None:
        self.count += 1
        self.total += value
        if value < self.min:  # noqa: PLR1730 - on the hot path of every request; a function call is slower
            self.min = value
        if value > self.max:  # noqa: PLR1730
            self.max = value
        self.window.append(value)
        self.buckets[bisect_left(BUCKETS, value)] += 1

    def summary(self) -> HistogramSummary:
        ordered = sorted(self.window)
        middle = len(ordered) // 2
        median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        return HistogramSummary(
            self.count,
            self.total / self.count,
            self.min,
            self.max,
            median,
            _rank(ordered, 95),
            _rank(ordered, 99),
        )


class Metrics:
    """Counters, gauges and histograms; every method may be called from any thread.

    >>> metrics = Metrics()
    >>> metrics.observe("step_ms", 12.0)
    >>> metrics.snapshot().histograms["step_ms"].p95
    12.0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, _Histogram] = {}
        self._kinds: dict[str, str] = dict(BUILTIN_KINDS)
        self._dropped = 0

    def increment(self, name: str, by: float = 1.0, **labels: str) -> None:
        """Adds ``by`` to the counter ``name`` with these ``labels``; raises ``ValueError`` for negative and non-finite amounts.

        >>> metrics = Metrics()
        >>> metrics.increment("steps_total", by=2.0, run="a")
        >>> metrics.snapshot().counters
        {'steps_total{run="a"}': 2.0}
        """
        if not 0 <= by < math.inf:
            raise ValueError(
                f"counter {name} cannot be incremented by {by!r}; use set_gauge for values that decrease"
            )
        self._check_name(name, "counter", labels)
        self._add(_series(name, labels), by)

    def set_gauge(self, name: str, value: float, **labels: str) -> None:
        """Sets the gauge ``name`` with these ``labels`` to ``value``.

        >>> metrics = Metrics()
        >>> metrics.set_gauge("learning_rate", 0.5)
        >>> metrics.snapshot().gauges
        {'learning_rate': 0.5}
        """
        self._check_name(name, "gauge", labels)
        series = _series(name, labels)
        with self._lock:
            if self._has_room(series, self._gauges):
                self._gauges[series] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds ``value`` to the histogram ``name`` with these ``labels``; non-finite values are skipped.

        >>> metrics = Metrics()
        >>> metrics.observe("step_ms", 12.0)
        >>> metrics.snapshot().histograms["step_ms"].count
        1
        """
        self._check_name(name, "histogram", labels)
        if math.isfinite(value):
            self._add(None, 0.0, _series(name, labels), value)

    def _add(self, counter: str | None, by: float, histogram: str | None = None, value: float = 0.0) -> None:
        """Adds to a counter and to a histogram, by their full names, under one lock."""
        with self._lock:
            if counter is not None:
                count = self._counters.get(counter)
                if count is not None or self._has_room(counter, self._counters):
                    self._counters[counter] = by if count is None else count + by
            if histogram is not None:
                series = self._histograms.get(histogram)
                if series is None and self._has_room(histogram, self._histograms):
                    series = self._histograms[histogram] = _Histogram()
                if series is not None:
                    series.observe(value)

    def _check_name(self, name: str, kind: str, labels: Mapping[str, str]) -> None:
        """Rejects names that Prometheus cannot parse: one such line invalidates the whole page."""
        if not _NAME.fullmatch(name) or not all(map(_LABEL.fullmatch, labels)):
            raise ValueError(
                f"{name!r} with labels {sorted(labels)} is not a valid metric name; use letters, digits and _, such as "
                "my_steps_total"
            )
        if kind == "histogram" and "le" in labels:
            raise ValueError(f"the label 'le' of histogram {name} is reserved; rename yours")
        with self._lock:
            known = self._kinds.get(name, kind)
            if len(self._kinds) < MAX_SERIES:
                self._kinds[name] = known
        if known != kind:
            raise ValueError(f"{name} is already a {known}, so it cannot be a {kind}; choose another name")

    def count_request(self, event: RequestFinished) -> None:
        """Counts and times the request of ``event``; a fast path, because every request calls it.

        >>> metrics = Metrics()
        >>> metrics.count_request(RequestFinished("healthz", 0, 200, 0.012))
        >>> metrics.snapshot().counters
        {'tinkex_requests_total{endpoint="healthz",outcome="ok"}': 1.0}
        """
        series = _request_series(event.endpoint, not event.failed)
        self._add(series[0], 1.0, series[1], event.elapsed_s * 1000)

    def snapshot(self) -> Snapshot:
        """Returns all metrics at this moment.

        >>> Metrics().snapshot().counters
        {}
        """
        with self._lock:
            histograms = {series: each.summary() for series, each in self._histograms.items()}
            return Snapshot(dict(self._counters), dict(self._gauges), histograms, self._dropped)

    def reset(self) -> None:
        """Deletes all metrics.

        >>> metrics = Metrics()
        >>> metrics.increment("steps_total")
        >>> metrics.reset()
        >>> metrics.snapshot().counters
        {}
        """
        with self._lock:
            self._clear()

    def prometheus(self) -> str:
        """Returns the metrics in Prometheus text format.

        >>> metrics = Metrics()
        >>> metrics.increment("steps_total")
        >>> print(metrics.prometheus().strip())
        # TYPE steps_total counter
        steps_total 1
        """
        with self._lock:
            lines = [
                *_family("counter", {s: f"{_number(v)}" for s, v in self._counters.items()}),
                *_family("gauge", {s: f"{_number(v)}" for s, v in self._gauges.items()}),
            ]
            declared: set[str] = set()
            for series in sorted(self._histograms):
                each = self._histograms[series]
                name, _, labels = series.partition("{")
                if name not in declared:
                    declared.add(name)
                    lines.append(f"# TYPE {name} histogram")
                inside = labels.removesuffix("}")
                start = f"{inside}," if inside else ""
                names = [*map(_number, BUCKETS), "+Inf"]
                bounds = zip(names, accumulate(each.buckets), strict=True)
                lines += [f'{name}_bucket{{{start}le="{bound}"}} {count}' for bound, count in bounds]
                suffix = f"{{{inside}}}" if inside else ""
                lines += [f"{name}_sum{suffix} {_number(each.total)}", f"{name}_count{suffix} {each.count}"]
        return "\n".join(lines) + "\n" if lines else ""

    def _has_room(self, series: str, known: Mapping[str, object]) -> bool:
        if series in known:
            return True
        if len(self._counters) + len(self._gauges) + len(self._histograms) < MAX_SERIES:
            return True
        self._dropped += 1
        return False


class MetricsSink:
    """Counts a client's events in ``metrics`` (by default new ones), and forwards each to ``then`` (by default to the log).

    ::

        sink = MetricsSink()
        service = tinkex.ServiceClient(events=sink)
        print(sink.metrics.prometheus())
    """

    def __init__(self, metrics: Metrics | None = None, *, then: Sink | None = None) -> None:
        self.metrics = metrics or Metrics()
        self.then: Sink = then or LogSink()
        """Receives every event next."""

    def emit(self, event: Event) -> None:
        """Counts ``event``.

        >>> sink = MetricsSink()
        >>> sink.emit(RetryScheduled("asample", 0, 0.5, "status 503"))
        >>> sink.metrics.snapshot().counters['tinkex_retries_total{endpoint="asample"}']
        1.0
        """
        kind = type(event)
        if kind is RequestFinished:
            assert isinstance(event, RequestFinished)
            self.metrics.count_request(event)
        elif kind is not RequestStarted:
            self._count(event)
        self.then.emit(event)

    def _count(self, event: Event) -> None:
        count, metrics = self.metrics.increment, self.metrics
        match event:
            case RetryScheduled():
                count("tinkex_retries_total", endpoint=event.endpoint)
            case QueueStateChanged():
                count("tinkex_queue_state_changes_total", state=event.state)
            case SamplingPaused():
                count("tinkex_sampling_pauses_total")
            case CircuitChanged():
                open_ = float(event.state != "closed")
                metrics.set_gauge("tinkex_circuit_open", open_, endpoint=event.endpoint or event.purpose)
            case StreamingUnavailable():
                count("tinkex_streams_unavailable_total")
            case _:
                count("tinkex_events_total", event=type(event).__name__)


@functools.lru_cache(maxsize=1024)
def _request_series(endpoint: str, ok: bool) -> tuple[str, str]:
    """Returns the names of a request's counter and histogram series."""
    return (
        _series("tinkex_requests_total", {"endpoint": endpoint, "outcome": "ok" if ok else "error"}),
        _series("tinkex_request_duration_ms", {"endpoint": endpoint}),
    )


def _series(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    inside = ",".join(f'{key}="{_escaped(str(labels[key]))}"' for key in sorted(labels))
    return f"{name}{{{inside}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _rank(ordered: list[float], percent: int) -> float:
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def _number(value: float) -> str:
    """Formats a number for Prometheus.

    >>> [_number(value) for value in (2.0, 1.5, math.inf, math.nan)]
    ['2', '1.5', '+Inf', 'NaN']
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)


def _family(kind: str, series: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    declared: set[str] = set()
    for each in sorted(series):
        name = each.partition("{")[0]
        if name not in declared:
            declared.add(name)
            lines.append(f"# TYPE {name} {kind}")
        lines.append(f"{each} {series[each]}")
    return lines
