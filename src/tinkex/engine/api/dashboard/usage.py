"""Keys and usage: tokens and storage by user and by run."""

from __future__ import annotations

import time

from starlette.responses import Response

from tinkex.engine.api.dashboard.site import Visit
from tinkex.errors import InvalidInput

PERIODS = {"day": ("24 hours", 86_400), "week": ("7 days", 7 * 86_400), "month": ("30 days", 30 * 86_400)}
MAX_RUNS = 100


async def show_usage(visit: Visit) -> Response:
    """What was used in a period, what is stored now, and the keys."""
    period = visit.query.get("period", "week")
    if period not in PERIODS:
        raise InvalidInput(f"period is {period[:50]!r}; choose one of: {', '.join(PERIODS)}.")
    now, listings, owner = time.time(), visit.site.listings, visit.owner

    def read() -> dict[str, object]:
        used = listings.usage(owner, now - PERIODS[period][1])
        stored = listings.storage(owner)
        return {
            "users": sorted({*used, *stored}),
            "used": used,
            "stored": stored,
            "by_run": listings.usage_by_run(owner, now, MAX_RUNS),
            "keys": listings.keys(owner),
        }

    found = await visit.read(read)
    return visit.page(
        "usage.html",
        "usage",
        "Keys and usage",
        period=period,
        periods=PERIODS,
        own_key=visit.viewer.session.key.key_id if visit.viewer.session is not None else None,
        **found,
    )
