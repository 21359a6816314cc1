"""The playground: one prompt, answered by a base model and a checkpoint side by side.

The page only lists what can be sampled from; its requests are those of the compatible routes.
"""

from __future__ import annotations

import time

from starlette.responses import Response

from tinkex.engine.api.dashboard.site import Visit
from tinkex.engine.store import CheckpointKind

MAX_CHECKPOINTS = 300
READABLE = {CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS}


async def show_playground(visit: Visit) -> Response:
    """The page."""
    engine = visit.site.engine
    assert engine is not None, "the page is served with an engine only"
    now, user = time.time(), visit.viewer.user
    found = await visit.read(
        lambda: visit.site.listings.checkpoints(user, now, MAX_CHECKPOINTS, or_public=True)
    )
    checkpoints = [each for each in found if each.kind in READABLE]
    models = list(engine.models.names)
    chosen = visit.query.get("checkpoint", "")
    second = next((each.path for each in checkpoints if each.path == chosen), None)
    if second is None and checkpoints:
        second = checkpoints[0].path
    first = next(
        (each.base_model for each in checkpoints if each.path == second), models[0] if models else ""
    )
    return visit.page(
        "playground.html",
        "playground",
        "Playground",
        models=models,
        checkpoints=checkpoints,
        first=first,
        second=second or "",
    )
