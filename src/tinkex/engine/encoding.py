"""Requests and outcomes in the form they are stored and sent: protobuf for passes and samples, JSON for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.operation import REQUEST_TYPES, Kind, OperationRequest
from tinkex.engine.store import Outcome, ResultFormat
from tinkex.errors import EngineError, RequestErrorCategory
from tinkex.types import ForwardBackwardRequest, OptimStepResponse, SampleResponse
from tinkex.types.base import Value
from tinkex.types.plain import finite_or_text


def encode_request(request: OperationRequest) -> bytes:
    """A request as it is recorded."""
    if isinstance(request, ForwardBackwardRequest):
        return wire_proto.encode_forward_backward(request)
    return wire_json.encode(request)


def decode_request(kind: Kind, body: bytes) -> OperationRequest:
    """The request in a recorded body; raises ``ValueError`` if it is not of this kind.

    >>> from tinkex.types import UnloadModelRequest
    >>> decode_request(Kind.UNLOAD, encode_request(UnloadModelRequest(model_id="m"))).model_id
    'm'
    """
    if kind.packs:
        return wire_proto.decode_forward_backward(body)
    return wire_json.decode(body, REQUEST_TYPES[kind])


def passed(output: bytes) -> Outcome:
    """The result of a pass, which comes encoded from where it was computed."""
    return Outcome.done(output, ResultFormat.PROTO)


def succeeded(value: Value | SampleResponse) -> Outcome:
    """A result: protobuf for samples, JSON for the rest.

    >>> succeeded(OptimStepResponse(metrics={"grad_norm": 0.5})).result
    b'{"metrics":{"grad_norm":0.5}}'
    """
    if isinstance(value, SampleResponse):
        return Outcome.done(wire_proto.encode_sample_response(value), ResultFormat.PROTO)
    if isinstance(value, OptimStepResponse):
        return Outcome.done(wire_json.encode({"metrics": _finite(value.metrics or {})}), ResultFormat.JSON)
    return Outcome.done(wire_json.encode(value), ResultFormat.JSON)


def failed(error: BaseException) -> Outcome:
    """A failure, with the side at fault; an error that is not ours is the server's."""
    category = error.category if isinstance(error, EngineError) else RequestErrorCategory.Server
    text = str(error) or type(error).__name__
    return Outcome.failed(
        text if isinstance(error, EngineError) else f"{type(error).__name__}: {text}", category
    )


def _finite(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {name: finite_or_text(float(value)) for name, value in metrics.items()}
