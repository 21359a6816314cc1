"""Decoding request bodies: protobuf or JSON by content type, including the JSON forms of older clients."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from google.protobuf.message import DecodeError

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex._wire import tinkex_wire_pb2 as pb
from tinkex._wire.counting import count_json_values, count_proto_values
from tinkex._wire.endpoints import Endpoint
from tinkex.engine.api.dialects import Route
from tinkex.engine.intake.admission import UNNUMBERED
from tinkex.errors import InvalidInput
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput, TensorData
from tinkex.types.base import Options

MAX_NESTING = 64
NESTING_NOT_CHECKED = frozenset({"asample", "stream_sample", "telemetry"})
"""Endpoints whose fields have a fixed shape, or whose requests are not stored."""
MAX_SEQ_ID = 2**31 - 1
"""Passes are recorded as protobuf, whose field has 32 bits."""
SEARCHED_BYTES = 64 * 1024
"""How much of the start and the end of invalid JSON is searched for its run and seq_id."""
_MODEL_ID = re.compile(rb'"model_id"\s*:\s*"([\x20\x21\x23-\x5b\x5d-\x7e]+)"')
_PROTO_PREFIX = re.compile(rb"\x0a([\x01-\x7f])([\x20-\x7e]+)\x10([\x80-\xff]{0,4}[\x01-\x7f])")
_SEQ_ID = re.compile(rb'"seq_id"\s*:\s*([0-9]{1,18})(?=[\s,}])')


class JsonDatum(Options, frozen=True, kw_only=True):
    """A datum in the JSON form of older clients."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class JsonPassInput(Options, frozen=True, kw_only=True):
    """The data of a pass in the JSON form of older clients."""

    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonPass(Options, frozen=True, kw_only=True):
    """``POST forward_backward`` and ``POST forward`` in the JSON form of clients without protobuf."""

    model_id: str
    seq_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ_ID)] | None = None
    forward_backward_input: JsonPassInput | None = None
    forward_input: JsonPassInput | None = None


class SequenceFields(msgspec.Struct):
    """The fields of a request that identify its position in a run, read when the rest is invalid."""

    model_id: str | None = None
    seq_id: int | None = None


def decode_request(endpoint: Endpoint, body: bytes, content_type: str) -> Any:
    """Returns the request in a body; raises :class:`InvalidInput`, which names the invalid field."""
    if endpoint.request is None:
        return None
    if isinstance(endpoint, Route):
        try:
            check_nesting(body)
            return wire_json.decode(body, endpoint.request, strict=True)
        except (ValueError, RecursionError) as error:
            raise endpoint.explain(error) from error
    try:
        if endpoint.request is not ForwardBackwardRequest:
            if endpoint.name not in NESTING_NOT_CHECKED:
                check_nesting(body)
            return wire_json.decode(body, endpoint.request)
        if is_proto(content_type):
            return wire_proto.decode_forward_backward(body)
        return _json_pass(wire_json.decode(body, JsonPass), forward_only=endpoint.name == "forward")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body of {endpoint.name} is invalid: {error}") from error


def count_values(endpoint: Endpoint, body: bytes, content_type: str, limit: int) -> int:
    """Returns the number of values that :func:`decode_request` would make; stops soon after ``limit``."""
    if endpoint.request is None:
        return 0
    if endpoint.request is ForwardBackwardRequest and is_proto(content_type):
        return count_proto_values(body, limit)
    return count_json_values(body, limit)


def check_nesting(body: bytes) -> None:
    """Reject JSON that is nested so deeply that it could not be encoded again.

    >>> check_nesting(b'{"user_metadata": {"a": [1, 2]}}')
    >>> check_nesting(b"[" * 100 + b"]" * 100)
    Traceback (most recent call last):
      ...
    ValueError: it is nested deeper than 64 levels
    """
    if body.count(b"[") + body.count(b"{") <= MAX_NESTING:
        return
    level: list[Any] = [msgspec.json.decode(body)]
    for _ in range(MAX_NESTING + 1):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_NESTING} levels")


def read_seq_id(body: bytes, content_type: str) -> tuple[str, int] | None:
    """Returns the run and seq_id of a body that :func:`decode_request` rejected, or None if they cannot be read."""
    try:
        if is_proto(content_type):
            message = pb.ForwardBackwardRequest.FromString(body)
            fields = SequenceFields(model_id=message.model_id, seq_id=message.seq_id)
        else:
            fields = msgspec.json.decode(body, type=SequenceFields)
    except DecodeError:
        return _seq_id_of_truncated_proto(body)
    except (ValueError, RecursionError):
        return _seq_id_of_invalid_json(body)
    return (fields.model_id, fields.seq_id) if fields.model_id and fields.seq_id else None


def _seq_id_of_truncated_proto(body: bytes) -> tuple[str, int] | None:
    """The same for the start of a protobuf message, which begins with both fields.

    >>> _seq_id_of_truncated_proto(pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=300).SerializeToString() + b"cut off")
    ('s:train:0', 300)
    """
    found = _PROTO_PREFIX.match(body)
    if found is None or found[1] != bytes([len(found[2])]):
        return None
    seq_id = sum((byte & 0x7F) << 7 * index for index, byte in enumerate(found[3]))
    return found[2].decode("ascii"), seq_id


def _seq_id_of_invalid_json(body: bytes) -> tuple[str, int] | None:
    """The same for invalid JSON, if it contains exactly one run and one seq_id.

    >>> _seq_id_of_invalid_json(b'{"model_id": "s:train:0", "seq_id": 7, "adam_params": {"learning_rate": NaN}}')
    ('s:train:0', 7)
    >>> _seq_id_of_invalid_json(b'{"model_id": "s:train:0", "seq_id": 7, "more": {"seq_id": 8}')
    """
    if len(body) > 2 * SEARCHED_BYTES:
        body = body[:SEARCHED_BYTES] + b"\n" + body[-SEARCHED_BYTES:]
    runs, seq_ids = set(_MODEL_ID.findall(body)), set(_SEQ_ID.findall(body))
    if len(runs) != 1 or len(seq_ids) != 1:
        return None
    return runs.pop().decode("ascii"), int(seq_ids.pop())


def is_proto(content_type: str) -> bool:
    """Returns whether a content type is protobuf."""
    return wire_proto.CONTENT_TYPE in content_type


def _json_pass(request: JsonPass, *, forward_only: bool) -> ForwardBackwardRequest:
    field, other = "forward_backward_input", "forward_input"
    if forward_only:
        field, other = other, field
    given: JsonPassInput | None = getattr(request, field)
    if given is None:
        raise ValueError(f"it has no {field}")
    if getattr(request, other) is not None:
        raise ValueError(f"{other} belongs to another endpoint")
    return ForwardBackwardRequest(
        model_id=request.model_id,
        seq_id=request.seq_id or UNNUMBERED,
        data=[Datum(datum.model_input, datum.loss_fn_inputs) for datum in given.data],
        loss_fn=given.loss_fn,
        loss_fn_config=given.loss_fn_config,
        forward_only=forward_only,
    )
