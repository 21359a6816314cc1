"""Counts the values of an encoded body before it is decoded, so that limits hold before any object is built.

A number or a string counts as 1; an object, a list or a message counts as :data:`CONTAINER_VALUES`, and a protobuf datum,
which is two bytes if it is empty, as :data:`DATUM_VALUES`, because they cost about that much more memory and time. Both
counts may be too high (text may contain commas), never too low.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from tinkex._wire import tinkex_wire_pb2 as pb

__all__ = ["CONTAINER_VALUES", "DATUM_VALUES", "count_json_values", "count_proto_values"]

CONTAINER_VALUES = 16
DATUM_VALUES = 128
STEP_BYTES = 1024 * 1024
"""How much is counted in one call, which other threads wait for."""

_VARINT_BYTES, _INT32_BYTES, _INT64_BYTES = 1, 4, 8
_MAP_VALUE = 2

Plan: TypeAlias = Mapping[int, "Plan | int"]
"""The fields of a message that are more than one value: the plan of a message, or the size of a packed number."""


def count_json_values(body: bytes, limit: int) -> int:
    """Returns the number of values in JSON; stops soon after ``limit``.

    >>> count_json_values(b'{"a": 1, "b": 2}', 1000), count_json_values(b"[{},{}]", 1000)
    (18, 50)
    """
    count = 1
    for start in range(0, len(body), STEP_BYTES):
        end = start + STEP_BYTES
        containers = body.count(b"{", start, end) + body.count(b"[", start, end)
        count += body.count(b",", start, end) + containers * CONTAINER_VALUES
        if count > limit:
            break
    return count


def count_proto_values(body: bytes, limit: int) -> int:
    """Returns the number of values in a ``ForwardBackwardRequest``; stops soon after ``limit``.

    Token ids count, because they become Python numbers; dense tensors count as one value, because they stay arrays. The
    count of a malformed message ends where it is malformed.

    >>> body = pb.ForwardBackwardRequest(model_id="run", data=[pb.Datum(), pb.Datum()]).SerializeToString()
    >>> count_proto_values(body, 1000)
    257
    """
    count = position = 0
    plan, end = _REQUEST, len(body)
    parents: list[tuple[Plan, int]] = []
    try:
        while count <= limit:
            while position >= end:
                if not parents:
                    return count
                plan, end = parents.pop()
            tag, position = _read_varint(body, position)
            count += 1
            match tag & 7:
                case 0:
                    _, position = _read_varint(body, position)
                case 1:
                    position += 8
                case 2:
                    length, position = _read_varint(body, position)
                    inner = plan.get(tag >> 3)
                    if position + length > end:
                        break
                    if isinstance(inner, Mapping):
                        count += (DATUM_VALUES if inner is _DATUM else CONTAINER_VALUES) - 1
                        parents.append((plan, end))
                        plan, end = inner, position + length
                    else:
                        count += length // inner if inner else 0
                        position += length
                case 5:
                    position += 4
                case _:  # a group, which only an unknown field can be; its fields follow
                    count += CONTAINER_VALUES - 1
    except IndexError:
        pass  # it ends in the middle of a field
    return count


def _read_varint(body: bytes, position: int) -> tuple[int, int]:
    value = body[position]
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    for shift in range(7, 70, 7):
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, position


_SPAN: Plan = {1: {}, 2: {}}
_TENSOR: Plan = {
    pb.Tensor.SPARSE_CSR_FIELD_NUMBER: {
        pb.SparseCsr.CROW_INDICES_FIELD_NUMBER: _INT64_BYTES,
        pb.SparseCsr.COL_INDICES_FIELD_NUMBER: _INT64_BYTES,
    },
    pb.Tensor.SHAPE_FIELD_NUMBER: _VARINT_BYTES,
}
_CHUNK: Plan = {
    pb.Chunk.ENCODED_TEXT_FIELD_NUMBER: {pb.EncodedTextChunk.TOKENS_FIELD_NUMBER: _INT32_BYTES},
    pb.Chunk.IMAGE_FIELD_NUMBER: {pb.ImageChunk.OVERRIDE_DIMENSIONS_FIELD_NUMBER: {}},
    pb.Chunk.DMEL_FIELD_NUMBER: {},
}
_DATUM: Plan = {
    pb.Datum.MODEL_INPUT_FIELD_NUMBER: _CHUNK,
    pb.Datum.LOSS_FN_INPUTS_FIELD_NUMBER: {_MAP_VALUE: _TENSOR},
    pb.Datum.MODEL_INPUT_SPANS_FIELD_NUMBER: _SPAN,
    pb.Datum.LOSS_FN_INPUT_SPANS_FIELD_NUMBER: _SPAN,
}
_REQUEST: Plan = {
    pb.ForwardBackwardRequest.DATA_FIELD_NUMBER: _DATUM,
    pb.ForwardBackwardRequest.LOSS_FN_CONFIG_FIELD_NUMBER: {},
    pb.ForwardBackwardRequest.LOSS_FN_CONFIG_V2_FIELD_NUMBER: {_MAP_VALUE: {}},
}
