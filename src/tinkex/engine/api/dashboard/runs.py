"""Runs: the list, one run, and several in one chart."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.responses import Response

from tinkex.engine.api.dashboard.rendering import SECURITY_HEADERS, render_part
from tinkex.engine.api.dashboard.series import MAX_RUNS, encode_key
from tinkex.engine.api.dashboard.site import Visit, with_query
from tinkex.engine.store import MetricKey
from tinkex.engine.store.listings import RunFilter
from tinkex.engine.store.loop_metrics import (
    GRADIENT_NORM,
    LEARNING_RATE,
    LOGPROB_GAP,
    LOSS_MEAN,
    LOSS_SUM,
    TOKENS_PER_S,
)
from tinkex.errors import InvalidInput

PAGE_SIZE = 50
MAX_OPERATIONS = 100
MAX_CHECKPOINTS = 200
FIRST_METRICS = (LOSS_MEAN, LEARNING_RATE, GRADIENT_NORM, TOKENS_PER_S, LOGPROB_GAP)
"""The charts at the top of a run, as far as it has them."""
LAST_LOSS = (LOSS_MEAN, LOSS_SUM)


async def list_runs(visit: Visit) -> Response:
    """The runs that match a filter, with how far each is."""
    listings, owner = visit.site.listings, visit.owner
    wanted = RunFilter(
        text=visit.query.get("q", "").strip()[:200],
        status=visit.query.get("status", ""),
        base_model=visit.query.get("model", ""),
        owner=visit.query.get("owner", "") if visit.viewer.sees_all else "",
    )
    number = _page_number(visit.query.get("page", "1"))

    def read() -> dict[str, object]:
        runs = listings.runs(owner, wanted, PAGE_SIZE, (number - 1) * PAGE_SIZE)
        latest = visit.site.metrics.latest([run.run_id for run in runs], LAST_LOSS, owner)
        losses = {
            run_id: next(
                (points[MetricKey(name)].value for name in LAST_LOSS if MetricKey(name) in points), None
            )
            for run_id, points in latest.items()
        }
        return {
            "runs": runs,
            "losses": losses,
            "total": listings.count_runs(owner, wanted),
            "statuses": listings.run_choices(owner, "status"),
            "models": listings.run_choices(owner, "base_model"),
            "owners": listings.run_choices(owner, "owner") if visit.viewer.sees_all else [],
        }

    found = await visit.read(read)
    total = found["total"]
    assert isinstance(total, int)

    def address(page: int) -> str:
        return with_query(
            "/runs",
            q=wanted.text,
            status=wanted.status,
            model=wanted.base_model,
            owner=wanted.owner,
            page=page if page > 1 else "",
        )

    return visit.page(
        "runs.html",
        "runs",
        "Runs",
        wanted=wanted,
        previous=address(number - 1) if number > 1 else None,
        next=address(number + 1) if number * PAGE_SIZE < total else None,
        page_number=number,
        max_runs=MAX_RUNS,
        **found,
    )


async def show_run(visit: Visit) -> Response:
    """One run: its curves, checkpoints and operations."""
    run = visit.run(visit.parameters["run_id"])
    site = visit.site

    def read() -> dict[str, object]:
        latest = site.metrics.latest([run.run_id], owner=visit.owner).get(run.run_id, {})
        return {
            "metrics": [_choice(key) for key in _ordered(site.metrics.names(run.run_id, visit.owner))],
            "latest": {encode_key(key): point.value for key, point in latest.items()},
            "checkpoints": site.listings.checkpoints(None, time.time(), MAX_CHECKPOINTS, run_id=run.run_id),
            "operations": site.listings.operations(run.run_id, MAX_OPERATIONS),
            "has_rollouts": bool(site.rollouts.steps(run.run_id, limit=1, owner=visit.owner)),
        }

    found = await visit.read(read)
    return visit.page("run.html", "runs", run.title, run=run, is_own=run.owner == visit.viewer.user, **found)


async def show_operations(visit: Visit) -> Response:
    """The rows of a run's operations, for its page to refresh."""
    run = visit.run(visit.parameters["run_id"])
    operations = await visit.read(lambda: visit.site.listings.operations(run.run_id, MAX_OPERATIONS))
    html = render_part("operations.html", operations=operations)
    headers = {**SECURITY_HEADERS, "cache-control": "no-store"}
    return Response(html, 200, headers, media_type="text/html")


async def compare(visit: Visit) -> Response:
    """Several runs in one chart."""
    run_ids = list(dict.fromkeys(visit.request.query_params.getlist("run")))
    if not 2 <= len(run_ids) <= MAX_RUNS:
        raise InvalidInput(
            f"{len(run_ids)} runs were chosen to compare; choose 2 to {MAX_RUNS} in the list of runs."
        )
    runs = [visit.run(run_id) for run_id in run_ids]

    def read() -> Sequence[MetricKey]:
        names = [visit.site.metrics.names(run_id, visit.owner) for run_id in run_ids]
        return list(dict.fromkeys(key for keys in names for key in keys))

    keys = await visit.read(read)
    return visit.page(
        "compare.html",
        "runs",
        f"Compare {len(runs)} runs",
        runs=runs,
        labels=[{"id": run.run_id, "label": run.title} for run in runs],
        metrics=[_choice(key) for key in _ordered(keys)],
        chosen=visit.query.get("metric", ""),
    )


def _choice(key: MetricKey) -> dict[str, str]:
    return {"id": encode_key(key), "name": key.name, "source": str(key.source)}


def _ordered(keys: Sequence[MetricKey]) -> Sequence[MetricKey]:
    """What people look at first, then the others as they are."""
    first = [MetricKey(name) for name in FIRST_METRICS if MetricKey(name) in keys]
    return [*first, *(key for key in keys if key not in first)]


def _page_number(text: str) -> int:
    """The number of a page of a list; the first for anything else.

    >>> _page_number("3"), _page_number("-1"), _page_number("x")
    (3, 1, 1)
    """
    return int(text) if text.isdecimal() and text.isascii() and int(text[:9]) > 0 else 1
