"""Bodies into requests: protobuf or JSON by content type, also the JSON forms of older clients on the same paths."""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex._wire import tinkex_wire_pb2 as pb
from tinkex._wire.endpoints import Endpoint
from tinkex.engine.operations.admission import UNNUMBERED
from tinkex.errors import InvalidInput
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput, TensorData
from tinkex.types.base import Options


class JsonDatum(Options, frozen=True, kw_only=True):
    """A datum as older clients write it."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class JsonPassInput(Options, frozen=True, kw_only=True):
    """The data of a pass as older clients write it."""

    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonPass(Options, frozen=True, kw_only=True):
    """``POST forward_backward`` and ``POST forward`` as clients before protobuf wrote them."""

    model_id: str
    seq_id: int | None = None
    forward_backward_input: JsonPassInput | None = None
    forward_input: JsonPassInput | None = None


class Numbered(msgspec.Struct):
    """The part of a request that says whose turn it takes, read when the rest is unreadable."""

    model_id: str | None = None
    seq_id: int | None = None


def decode_request(endpoint: Endpoint, body: bytes, content_type: str) -> Any:
    """The request in a body, or :class:`InvalidInput` that names the field that is wrong."""
    if endpoint.request is None:
        return None
    try:
        if endpoint.request is not ForwardBackwardRequest:
            return wire_json.decode(body, endpoint.request)
        if is_proto(content_type):
            return wire_proto.decode_forward_backward(body)
        return _json_pass(wire_json.decode(body, JsonPass), forward_only=endpoint.name == "forward")
    except ValueError as error:
        raise InvalidInput(f"the body of {endpoint.name} cannot be read: {error}") from error


def read_number(body: bytes, content_type: str) -> tuple[str, int] | None:
    """The run and seq_id of a body that :func:`decode_request` refused, if at least these can be read."""
    try:
        if is_proto(content_type):
            message = pb.ForwardBackwardRequest.FromString(body)
            turn = Numbered(model_id=message.model_id, seq_id=message.seq_id)
        else:
            turn = msgspec.json.decode(body, type=Numbered)
    except (ValueError, DecodeError):
        return None
    return (turn.model_id, turn.seq_id) if turn.model_id and turn.seq_id else None


def is_proto(content_type: str) -> bool:
    """Whether a header says protobuf."""
    return wire_proto.CONTENT_TYPE in content_type


def _json_pass(request: JsonPass, *, forward_only: bool) -> ForwardBackwardRequest:
    field, other = "forward_backward_input", "forward_input"
    if forward_only:
        field, other = other, field
    given: JsonPassInput | None = getattr(request, field)
    if given is None:
        raise ValueError(f"it has no {field}")
    if getattr(request, other) is not None:
        raise ValueError(f"{other} belongs to another call")
    return ForwardBackwardRequest(
        model_id=request.model_id,
        seq_id=request.seq_id or UNNUMBERED,
        data=[Datum(datum.model_input, datum.loss_fn_inputs) for datum in given.data],
        loss_fn=given.loss_fn,
        loss_fn_config=given.loss_fn_config,
        forward_only=forward_only,
    )
