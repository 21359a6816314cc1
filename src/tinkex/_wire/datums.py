"""Encodes training data as protobuf, directly from the arrays.

A request may hold megabytes. The protobuf library copies them into its message and again, several times while its
buffer grows, into the result; here every array is copied once, by the final join. Small or rare parts (images, spans,
sparse tensors) use the library.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np

from tinkex._wire import tinkex_wire_pb2 as pb
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInputChunk,
    PromptProvenanceSpan,
    TensorData,
)

__all__ = ["WIRE_DTYPES", "Buffer", "datum_parts", "message_field", "write_tensor"]

Buffer: TypeAlias = bytes | memoryview

WIRE_DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}

_I64 = np.dtype("<i8")
_DELIMITED, _VARINT = 2, 0
_TOKENS = pb.EncodedTextChunk.TOKENS_FIELD_NUMBER
_TEXT = pb.Chunk.ENCODED_TEXT_FIELD_NUMBER
_MODEL_INPUT = pb.Datum.MODEL_INPUT_FIELD_NUMBER
_LOSS_FN_INPUTS = pb.Datum.LOSS_FN_INPUTS_FIELD_NUMBER
_DENSE, _DTYPE, _SHAPE = (
    pb.Tensor.DENSE_FIELD_NUMBER,
    pb.Tensor.DTYPE_FIELD_NUMBER,
    pb.Tensor.SHAPE_FIELD_NUMBER,
)
_MAP_KEY, _MAP_VALUE = 1, 2


def message_field(parts: list[Buffer], number: int, body: list[Buffer]) -> None:
    r"""Appends a length-delimited field: tag, length, body.

    >>> parts = []
    >>> message_field(parts, 3, [b"ab", b"c"])
    >>> b"".join(parts)
    b'\x1a\x03abc'
    """
    parts.append(_head(number, sum(map(_size, body))))
    parts.extend(body)


def datum_parts(datum: Datum) -> list[Buffer]:
    r"""Encodes the datum as a ``Datum`` message, in parts to be joined.

    >>> from tinkex.types import ModelInput
    >>> b"".join(datum_parts(Datum(ModelInput.from_ints([5]))))
    b'\n\x08\n\x06\n\x04\x05\x00\x00\x00'
    """
    parts: list[Buffer] = []
    for chunk in datum.model_input.chunks:
        message_field(parts, _MODEL_INPUT, _chunk_parts(chunk))
    for key, tensor in datum.loss_fn_inputs.items():
        name = key.encode()
        entry: list[Buffer] = [_head(_MAP_KEY, len(name)) + name]
        message_field(entry, _MAP_VALUE, _tensor_parts(tensor))
        message_field(parts, _LOSS_FN_INPUTS, entry)
    if datum.model_input_spans or datum.loss_fn_input_spans:
        parts.append(_spans(datum))
    return parts


def write_tensor(message: Any, tensor: TensorData) -> None:
    """Fills a ``Tensor`` message."""
    message.dtype = WIRE_DTYPES[tensor.dtype]
    if tensor.shape is not None:
        message.shape.extend(tensor.shape)
    if tensor.is_sparse:
        message.sparse_csr.values = tensor.array.tobytes()
        message.sparse_csr.crow_indices = np.asarray(tensor.sparse_crow_indices, dtype=_I64).tobytes()
        message.sparse_csr.col_indices = np.asarray(tensor.sparse_col_indices, dtype=_I64).tobytes()
    else:
        message.dense = tensor.array.tobytes()


def _chunk_parts(chunk: ModelInputChunk) -> list[Buffer]:
    if isinstance(chunk, EncodedTextChunk):
        tokens = struct.pack(f"<{len(chunk.tokens)}i", *chunk.tokens)
        inner = _head(_TOKENS, len(tokens)) if tokens else b""
        return [_head(_TEXT, len(inner) + len(tokens)) + inner, tokens]
    message = pb.Chunk()
    if isinstance(chunk, ImageChunk):
        message.image.data = chunk.data
        message.image.format = chunk.format
        if chunk.expected_tokens is not None:
            message.image.expected_tokens = chunk.expected_tokens
    elif isinstance(chunk, DmelChunk):
        message.dmel.dmel = chunk.dmel
    else:
        raise ValueError(
            f"a chunk of type {chunk.type!r} is not supported in training data; send the image as an ImageChunk"
        )
    return [message.SerializeToString()]


def _tensor_parts(tensor: TensorData) -> list[Buffer]:
    if tensor.is_sparse:
        message = pb.Tensor()
        write_tensor(message, tensor)
        return [message.SerializeToString()]
    data = tensor.array.data.cast("B") if tensor.array.size else memoryview(b"")
    tail = _varint(_DTYPE << 3 | _VARINT) + _varint(WIRE_DTYPES[tensor.dtype])
    if tensor.shape:
        shape = b"".join(map(_varint, tensor.shape))
        tail += _head(_SHAPE, len(shape)) + shape
    return [_head(_DENSE, data.nbytes), data, tail]


def _spans(datum: Datum) -> bytes:
    message = pb.Datum()
    for spans, field in (
        (datum.model_input_spans, message.model_input_spans),
        (datum.loss_fn_input_spans, message.loss_fn_input_spans),
    ):
        for span in spans or ():
            entry = field.add()
            side = entry.prompt_tokens if isinstance(span, PromptProvenanceSpan) else entry.sampled_tokens
            side.sequence_id, side.offset, side.length = span.sequence_id, span.offset, span.length
    return message.SerializeToString()


def _head(number: int, size: int) -> bytes:
    return _varint(number << 3 | _DELIMITED) + _varint(size)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return value.to_bytes(1, "little")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _size(part: Buffer) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)
