"""Passes: the datums of a request are read once, into the job that a lane runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from tinkex._wire import json as wire_json
from tinkex.engine.lanes.interface import ModelInfo, PassJob, UploadedLoss
from tinkex.engine.store import Store
from tinkex.engine.trainer.examples import read_pass
from tinkex.errors import InvalidInput, UnknownObject
from tinkex.types import CreateCustomLossRequest, ForwardBackwardRequest

CUSTOM_LOSS = "custom"


@dataclass(frozen=True)
class DeclaredInputs:
    """The inputs of an uploaded loss besides the logprobs, and the dimensions of each."""

    input_names: Sequence[str]
    ranks: Mapping[str, int]


def read_job(
    store: Store, owner: str, run_id: str, request: ForwardBackwardRequest, info: ModelInfo
) -> PassJob:
    """The job that a pass asks for; raises ``InvalidInput`` for datums that cannot be used."""
    custom_loss = find_custom_loss(store, owner, request)
    declared = declared_inputs(custom_loss) if custom_loss is not None else None
    _, examples = read_pass(request.data, request.loss_fn, request.loss_fn_config, info.passes, declared)
    return PassJob(run_id, request.loss_fn, examples, not request.forward_only, custom_loss)


def find_custom_loss(store: Store, owner: str, request: ForwardBackwardRequest) -> UploadedLoss | None:
    """The uploaded loss that a pass names, or None if it uses a built-in one."""
    if request.loss_fn != CUSTOM_LOSS:
        return None
    loss_id = (request.loss_fn_config or {}).get("loss_id")
    if not isinstance(loss_id, str):
        raise InvalidInput(
            "loss_fn 'custom' needs a loss_id, as text, in its loss_fn_config; create_custom_loss returns one."
        )
    row = store.losses.get(loss_id)
    if row is None or row.owner != owner:
        raise UnknownObject(
            f"there is no custom loss {loss_id!r} of yours; create one with create_custom_loss."
        )
    return UploadedLoss(loss_id, row.definition)


def digest_of(loss: UploadedLoss | None) -> str | None:
    """A digest of what an uploaded loss computes, whatever its id and name; None for a built-in one."""
    return _digest(loss) if loss is not None else None


@lru_cache(maxsize=256)
def _digest(loss: UploadedLoss) -> str:
    request = wire_json.decode(loss.definition, CreateCustomLossRequest)
    content = msgspec.json.encode([request.inputs, request.graph], order="sorted")
    return hashlib.sha256(content).hexdigest()


@lru_cache(maxsize=256)
def declared_inputs(loss: UploadedLoss) -> DeclaredInputs:
    """The inputs of an uploaded loss, without the graph that computes it."""
    inputs = wire_json.decode(loss.definition, CreateCustomLossRequest).inputs
    return DeclaredInputs([one.name for one in inputs[1:]], {one.name: one.rank for one in inputs})
