"""Requests as the journal keeps them: protobuf for passes, JSON for the rest."""

from __future__ import annotations

from collections.abc import Mapping

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.operations.backlog import Operation
from tinkex.engine.scheduler import Kind
from tinkex.types import (
    CreateModelRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
)

_JSON_KINDS: Mapping[Kind, type[Operation]] = {
    Kind.CREATE: CreateModelRequest,
    Kind.OPTIM_STEP: OptimStepRequest,
    Kind.SAVE: SaveWeightsRequest,
    Kind.SAVE_FOR_SAMPLER: SaveWeightsForSamplerRequest,
    Kind.SAVE_EXTERNAL: SaveWeightsExternalRequest,
    Kind.LOAD: LoadWeightsRequest,
    Kind.UNLOAD: UnloadModelRequest,
    Kind.SAMPLE: SampleRequest,
}


def encode_operation(request: Operation) -> bytes:
    """A request as it is recorded."""
    if isinstance(request, ForwardBackwardRequest):
        return wire_proto.encode_forward_backward(request)
    return wire_json.encode(request)


def decode_operation(kind: Kind, body: bytes) -> Operation:
    """The request in a recorded body; ``ValueError`` if it is none of this kind.

    >>> from tinkex.types import UnloadModelRequest
    >>> decode_operation(Kind.UNLOAD, encode_operation(UnloadModelRequest(model_id="m"))).model_id
    'm'
    """
    if kind.packs:
        return wire_proto.decode_forward_backward(body)
    return wire_json.decode(body, _JSON_KINDS[kind])
