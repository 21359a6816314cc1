"""The checkpoints of the viewer, or of all users."""

from __future__ import annotations

import time

from starlette.responses import Response

from tinkex.engine.api.dashboard.site import Visit

MAX_CHECKPOINTS = 500


async def list_checkpoints(visit: Visit) -> Response:
    """The live checkpoints, newest first."""
    now, listings = time.time(), visit.site.listings
    checkpoints = await visit.read(lambda: listings.checkpoints(visit.owner, now, MAX_CHECKPOINTS))
    total = await visit.read(lambda: listings.count_checkpoints(visit.owner, now))
    return visit.page(
        "checkpoints.html",
        "checkpoints",
        "Checkpoints",
        checkpoints=checkpoints,
        total=total,
        num_bytes=sum(each.size_bytes for each in checkpoints),
    )
