"""``GET /models``: base models, and the caller's checkpoints."""

from __future__ import annotations

import time
from typing import Any

from tinkex.engine.api.call import Call, Reply
from tinkex.engine.api.compatible.models import find_model
from tinkex.engine.api.errors import json_response
from tinkex.engine.lookup import find_checkpoint
from tinkex.engine.served_models import context_length
from tinkex.engine.store import CheckpointKind, CheckpointRow

MAX_CHECKPOINTS = 1000
"""How many checkpoints are listed, the newest first."""
OWNER = "tinkex"


async def list_models(call: Call) -> Reply:
    """Returns the base models and the caller's newest checkpoints that can be sampled."""
    engine = call.engine
    rows = engine.store.checkpoints.of_owner(
        call.owner, time.time(), MAX_CHECKPOINTS, 0, CheckpointKind.EXTERNAL_WEIGHTS
    )
    models = [_base_model(call, name) for name in engine.models.names]
    return json_response({"object": "list", "data": [*models, *(_checkpoint(row) for row in rows)]})


async def get_model(call: Call) -> Reply:
    """Returns one model by its name."""
    choice = await find_model(call.engine, call.owner, call.parameters["model"])
    if choice.model_path is None:
        return json_response(_base_model(call, choice.name))
    row = find_checkpoint(call.engine.store, call.owner, choice.model_path)
    return json_response({**_checkpoint(row), "id": choice.name})


def _base_model(call: Call, name: str) -> dict[str, Any]:
    context = context_length(name) or call.engine.models.find(name).describe().max_context_length
    return {"id": name, "object": "model", "created": 0, "owned_by": OWNER, "max_model_len": context}


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    return {
        "id": row.path,
        "object": "model",
        "created": int(row.created_at),
        "owned_by": row.owner,
        "parent": row.base_model,
    }
