"""Bodies into requests: protobuf or JSON by content type, also the JSON forms of older clients on the same paths."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex._wire import tinkex_wire_pb2 as pb
from tinkex._wire.endpoints import Endpoint
from tinkex.engine.intake.admission import UNNUMBERED
from tinkex.errors import InvalidInput
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput, TensorData
from tinkex.types.base import Options

MOST_NESTED = 64
FLAT = frozenset({"asample", "stream_sample", "telemetry"})
"""Calls with fields of any length and none of any shape, or nothing of which is kept."""
_RUN = re.compile(rb'"model_id"\s*:\s*"([\x20\x21\x23-\x5b\x5d-\x7e]+)"')
_IN_FRONT = re.compile(rb"\x0a([\x01-\x7f])([\x20-\x7e]+)\x10([\x80-\xff]{0,4}[\x01-\x7f])")
_NUMBER = re.compile(rb'"seq_id"\s*:\s*([0-9]{1,18})(?=[\s,}])')


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
            if endpoint.name not in FLAT:
                check_nesting(body)
            return wire_json.decode(body, endpoint.request)
        if is_proto(content_type):
            return wire_proto.decode_forward_backward(body)
        return _json_pass(wire_json.decode(body, JsonPass), forward_only=endpoint.name == "forward")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body of {endpoint.name} cannot be read: {error}") from error


def check_nesting(body: bytes) -> None:
    """Refuse JSON that is nested so deeply that what is kept of it could not be told again.

    >>> check_nesting(b'{"user_metadata": {"a": [1, 2]}}')
    >>> check_nesting(b"[" * 100 + b"]" * 100)
    Traceback (most recent call last):
      ...
    ValueError: it is nested deeper than 64 levels
    """
    if body.count(b"[") + body.count(b"{") <= MOST_NESTED:
        return
    level: list[Any] = [msgspec.json.decode(body)]
    for _ in range(MOST_NESTED + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MOST_NESTED} levels")


def read_number(body: bytes, content_type: str) -> tuple[str, int] | None:
    """The run and seq_id of a body that :func:`decode_request` refused, if at least these can be read."""
    try:
        if is_proto(content_type):
            message = pb.ForwardBackwardRequest.FromString(body)
            turn = Numbered(model_id=message.model_id, seq_id=message.seq_id)
        else:
            turn = msgspec.json.decode(body, type=Numbered)
    except DecodeError:
        return _number_in_front(body)
    except (ValueError, RecursionError):
        return _seen_number(body)
    return (turn.model_id, turn.seq_id) if turn.model_id and turn.seq_id else None


def _number_in_front(body: bytes) -> tuple[str, int] | None:
    """The same for the start of a protobuf message: both fields are written before all others.

    >>> _number_in_front(pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=300).SerializeToString() + b"cut off")
    ('s:train:0', 300)
    """
    found = _IN_FRONT.match(body)
    if found is None or found[1] != bytes([len(found[2])]):
        return None
    number = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(found[3]))
    return found[2].decode("ascii"), number


def _seen_number(body: bytes) -> tuple[str, int] | None:
    """The same for what is no JSON, if it names one run and one number.

    >>> _seen_number(b'{"model_id": "s:train:0", "seq_id": 7, "adam_params": {"learning_rate": NaN}}')
    ('s:train:0', 7)
    >>> _seen_number(b'{"model_id": "s:train:0", "seq_id": 7, "more": {"seq_id": 8}')
    """
    runs, numbers = set(_RUN.findall(body)), set(_NUMBER.findall(body))
    if len(runs) != 1 or len(numbers) != 1:
        return None
    return runs.pop().decode("ascii"), int(numbers.pop())


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
