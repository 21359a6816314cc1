"""Requests as they are recorded: protobuf for passes, JSON for the rest."""

from __future__ import annotations

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.operation import REQUEST_TYPES, Kind, OperationRequest
from tinkex.types import ForwardBackwardRequest


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
