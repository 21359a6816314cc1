"""Curves for charts: downsampled for the width of a screen, exact where it is zoomed, live, and as CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import AsyncGenerator, Mapping, Sequence

from starlette.responses import Response

from tinkex.engine.api.dashboard.rendering import SECURITY_HEADERS, data
from tinkex.engine.api.dashboard.site import ENDED, IDLE, KEEP_ALIVE_S, Visit, event
from tinkex.engine.store import MetricKey, MetricSource, Point, Series
from tinkex.errors import InvalidInput

MAX_RUNS = 6
MAX_METRICS = 60
MAX_POINTS, DEFAULT_POINTS = 20_000, 2_000
MIN_INTERVAL_S = 0.5
"""Events are at least so far apart."""
POLL_S = 1.0
"""How often a data directory of another program is read."""
MAX_NEW = 1000


async def read_series(visit: Visit) -> Response:
    """Metrics of runs in a range of steps."""
    run_ids, keys = _run_ids(visit), _keys(visit)
    start, stop = _number(visit.query, "start", 0), _number(visit.query, "stop", 2**53)
    num_points = min(_number(visit.query, "points", DEFAULT_POINTS), MAX_POINTS)

    def read() -> Sequence[Mapping[str, object]]:
        found = []
        for key in keys:
            by_run = visit.site.metrics.series(
                run_ids, key, start=start, stop=stop, max_points=num_points, owner=visit.owner
            )
            runs = {run_id: _columns(each) for run_id, each in by_run.items()}
            found.append({"metric": encode_key(key), "name": key.name, "source": key.source, "runs": runs})
        return found

    return data({"metrics": await visit.read(read)})


async def follow_series(visit: Visit) -> Response:
    """New values of all metrics of some runs, as they are committed.

    The first event is ``ready``: what is read after it and what follows it is everything.
    """
    return visit.events(_events(visit, _run_ids(visit)))


async def _events(visit: Visit, run_ids: Sequence[str]) -> AsyncGenerator[bytes, None]:
    with contextlib.ExitStack() as stack:
        changes = visit.site.changes
        follower = stack.enter_context(changes.follow(run_ids)) if changes is not None else None
        latest = await visit.read(lambda: visit.site.metrics.latest(run_ids, owner=visit.owner))
        seen = {run_id: {key: point.step for key, point in keys.items()} for run_id, keys in latest.items()}
        yield event({}, "ready")
        while True:
            if follower is None:
                goes_on = await visit.until_change(POLL_S)
            else:
                goes_on = await visit.until_change(MIN_INTERVAL_S) and await visit.until_change(
                    KEEP_ALIVE_S, follower.changed
                )
            if not goes_on:
                yield ENDED
                return
            new = await visit.read(lambda: _new(visit, run_ids, seen))
            yield event(new) if new else IDLE


def _new(
    visit: Visit, run_ids: Sequence[str], seen: dict[str, dict[MetricKey, int]]
) -> Mapping[str, Mapping[str, object]]:
    """The values after those that were sent, by run and metric; those are recorded as sent."""
    found: dict[str, dict[str, object]] = {}
    for run_id in run_ids:
        sent = seen.setdefault(run_id, {})
        new = visit.site.metrics.new_values(run_id, sent, limit=MAX_NEW, owner=visit.owner)
        for key, points in new.items():
            sent[key] = points[-1].step
            found.setdefault(run_id, {})[encode_key(key)] = _points(points)
    return found


async def download_csv(visit: Visit) -> Response:
    """All values of metrics of runs, as a table with one row per run, metric and step."""
    run_ids, keys = _run_ids(visit), _keys(visit)

    def read() -> str:
        table = io.StringIO()
        writer = csv.writer(table)
        writer.writerow(["run", "metric", "step", "value", "tokens", "time"])
        for key in keys:
            series = visit.site.metrics.series(run_ids, key, max_points=2**53, owner=visit.owner)
            for run_id, each in series.items():
                for point in each.points:
                    value = "" if point.value is None else repr(point.value)
                    writer.writerow([run_id, _cell(key.name), point.step, value, point.tokens, point.at])
        return table.getvalue()

    text = await visit.read(read)
    name = re.sub(r"[^\w.-]+", "_", f"{keys[0].name if len(keys) == 1 else 'metrics'}", flags=re.ASCII)
    headers = {
        **SECURITY_HEADERS,
        "content-disposition": f'attachment; filename="{name}.csv"',
        "cache-control": "no-store",
    }
    return Response(text, 200, headers, media_type="text/csv")


def _cell(text: str) -> str:
    """A text as a cell that no spreadsheet takes for a formula.

    >>> _cell("=1+1"), _cell("loss:mean")
    ("'=1+1", 'loss:mean')
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def encode_key(key: MetricKey) -> str:
    """A metric as one text, for addresses and names of fields.

    >>> encode_key(MetricKey("loss:mean"))
    'automatic/loss:mean'
    """
    return f"{key.source}/{key.name}"


def decode_key(text: str) -> MetricKey:
    """The metric of a text; raises ``InvalidInput``.

    >>> decode_key("logged/eval/accuracy")
    MetricKey(name='eval/accuracy', source=<MetricSource.LOGGED: 'logged'>)
    """
    source, _, name = text.partition("/")
    try:
        return MetricKey(name, MetricSource(source))
    except ValueError:
        raise InvalidInput(
            f"metric is {text[:100]!r}; give automatic/NAME or logged/NAME, as the page of the run has it."
        ) from None


def _columns(series: Series) -> Mapping[str, object]:
    return {**_points(series.points), "exact": series.is_exact, "total": series.num_values}


def _points(points: Sequence[Point]) -> dict[str, object]:
    return {
        "step": [point.step for point in points],
        "value": [point.value for point in points],
        "at": [point.at for point in points],
        "tokens": [point.tokens for point in points],
    }


def _run_ids(visit: Visit) -> Sequence[str]:
    run_ids = list(dict.fromkeys(visit.request.query_params.getlist("run")))
    if not 1 <= len(run_ids) <= MAX_RUNS:
        raise InvalidInput(f"{len(run_ids)} runs were chosen; choose 1 to {MAX_RUNS}.")
    return [visit.run(run_id).run_id for run_id in run_ids]


def _keys(visit: Visit) -> Sequence[MetricKey]:
    texts = visit.request.query_params.getlist("metric")
    if not 1 <= len(texts) <= MAX_METRICS:
        raise InvalidInput(f"{len(texts)} metrics were chosen; choose 1 to {MAX_METRICS}.")
    return [decode_key(text) for text in texts]


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"\d{1,16}", text):
        raise InvalidInput(f"{name} is {text[:50]!r}; give a whole number.")
    return int(text)
