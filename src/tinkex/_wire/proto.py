"""The protobuf codec: forward_backward requests, and the results of training passes and sampling.

Numbers are raw little-endian bytes on the wire, which numpy reads without conversion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tinkex._wire import tinkex_wire_pb2 as pb
from tinkex._wire.datums import WIRE_DTYPES, Buffer, datum_parts, message_field, write_tensor
from tinkex._wire.json import Malformed
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ImageChunk,
    LossFnConfig,
    LossFnOutput,
    ModelInput,
    ModelInputChunk,
    PromptAltTokens,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)

CONTENT_TYPE = "application/x-protobuf"

_I32, _I64, _F32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")


# ---- forward_backward: request ----


def encode_forward_backward(request: ForwardBackwardRequest) -> bytes:
    """Encodes the request; numbers of the loss configuration go into both maps, strings into the second only."""
    message = pb.ForwardBackwardRequest(
        model_id=request.model_id,
        seq_id=request.seq_id,
        loss_fn=request.loss_fn,
        forward_only=request.forward_only,
    )
    for key, value in (request.loss_fn_config or {}).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = float(value)
            message.loss_fn_config_v2[key].number = float(value)
    parts: list[Buffer] = [message.SerializeToString()]
    for datum in request.data:
        message_field(parts, pb.ForwardBackwardRequest.DATA_FIELD_NUMBER, datum_parts(datum))
    return b"".join(parts)


def decode_forward_backward(data: bytes) -> ForwardBackwardRequest:
    """Decodes a request; raises ``Malformed``, which names the invalid datum and field."""
    message = _parse(pb.ForwardBackwardRequest, data)
    config: LossFnConfig = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise Malformed(f"loss_fn_config_v2[{key!r}] is neither a number nor a string")
        config[key] = getattr(value, kind)
    datums: list[Datum] = []
    for index, item in enumerate(message.data):
        try:
            datums.append(_read_datum(item))
        except (ValueError, TypeError) as error:
            raise Malformed(f"datum {index}: {error}") from error
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=datums,
        loss_fn=message.loss_fn,
        loss_fn_config=config or None,
        forward_only=message.forward_only,
    )


def _read_datum(message: Any) -> Datum:
    has_spans = bool(message.model_input_spans or message.loss_fn_input_spans)
    return Datum(
        model_input=ModelInput(chunks=[_read_chunk(c) for c in message.model_input]),
        loss_fn_inputs={key: _read_tensor(t) for key, t in message.loss_fn_inputs.items()},
        model_input_spans=_read_spans(message.model_input_spans) if has_spans else None,
        loss_fn_input_spans=_read_spans(message.loss_fn_input_spans) if has_spans else None,
    )


def _read_spans(spans: Sequence[Any]) -> ProvenanceSpans:
    out: ProvenanceSpans = []
    for span in spans:
        which = span.WhichOneof("source")
        if which is None:
            raise ValueError("a provenance span has no source")
        side = getattr(span, which)
        kind = PromptProvenanceSpan if which == "prompt_tokens" else SampledProvenanceSpan
        out.append(kind(sequence_id=side.sequence_id, offset=side.offset, length=side.length))
    return out


def _read_chunk(message: Any) -> ModelInputChunk:
    which = message.WhichOneof("chunk")
    if which == "encoded_text":
        return EncodedTextChunk(tokens=_numbers(message.encoded_text.tokens, _I32, "tokens").tolist())
    if which == "image":
        image = message.image
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        return ImageChunk(data=image.data, format=image.format, expected_tokens=expected)
    if which == "dmel":
        return DmelChunk(dmel=message.dmel.dmel)
    raise ValueError("a chunk is empty")


# ---- tensors ----


def _read_tensor(message: Any) -> TensorData:
    shape = list(message.shape) or None
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        values, dtype = _widened(csr.values, message.dtype)
        return TensorData(
            data=values,
            dtype=dtype,
            shape=shape,
            sparse_crow_indices=_numbers(csr.crow_indices, _I64, "crow_indices").tolist(),
            sparse_col_indices=_numbers(csr.col_indices, _I64, "col_indices").tolist(),
        )
    values, dtype = _widened(message.dense, message.dtype)
    return TensorData(data=values, dtype=dtype, shape=shape)


def _widened(data: bytes | memoryview, dtype: int) -> tuple[npt.NDArray[Any], Any]:
    if dtype == pb.DTYPE_FLOAT32:
        return _numbers(data, _F32, "float32 tensor"), "float32"
    if dtype == pb.DTYPE_INT64:
        return _numbers(data, _I64, "int64 tensor"), "int64"
    if dtype == pb.DTYPE_INT32:
        return _numbers(data, _I32, "int32 tensor").astype(_I64), "int64"
    if dtype == pb.DTYPE_BFLOAT16:
        halves = _numbers(data, np.dtype("<u2"), "bfloat16 tensor")
        return (halves.astype("<u4") << 16).view(_F32), "float32"
    raise ValueError(f"unknown tensor dtype {dtype}")


def _numbers(data: bytes | memoryview, dtype: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{what}: {len(data)} bytes are not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)


# ---- forward_backward: result ----


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """Encodes the result; consecutive datums with the same fields and trailing shape share a record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type)
    for name, value in output.metrics.items():
        message.metrics[name] = float(value)
    start = 0
    outputs = output.loss_fn_outputs
    while start < len(outputs):
        layout = _layout(outputs[start])
        end = start + 1
        while end < len(outputs) and _layout(outputs[end]) == layout:
            end += 1
        _write_record(message.loss_fn_outputs.add(), outputs[start:end])
        start = end
    return message.SerializeToString()


def decode_forward_backward_output(data: bytes) -> ForwardBackwardOutput:
    """Decodes a result: one dictionary of tensors per datum, in order."""
    message = _parse(pb.ForwardBackwardOutput, data)
    outputs: list[LossFnOutput] = []
    try:
        for record in message.loss_fn_outputs:
            outputs.extend(_read_record(record))
    except (ValueError, IndexError) as error:
        raise Malformed(f"loss_fn_outputs: {error}") from error
    kind = message.loss_fn_output_type.rpartition(":")[2]
    return ForwardBackwardOutput(
        loss_fn_output_type=kind or "ArrayRecord", loss_fn_outputs=outputs, metrics=dict(message.metrics)
    )


def _layout(output: LossFnOutput) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple(
        sorted((name, tensor.dtype, tuple((tensor.shape or [])[1:])) for name, tensor in output.items())
    )


def _write_record(record: Any, outputs: Sequence[LossFnOutput]) -> None:
    record.num_datums = len(outputs)
    for name, first in outputs[0].items():
        arrays = [output[name].array for output in outputs]
        field = record.fields[name]
        field.dtype = WIRE_DTYPES[first.dtype]
        field.data = np.concatenate(arrays).tobytes()
        field.offsets = np.cumsum([0, *(a.nbytes for a in arrays)], dtype=_I64).tobytes()
        field.trailing_shape.extend((first.shape or [])[1:])


def _read_record(record: Any) -> list[LossFnOutput]:
    outputs: list[LossFnOutput] = [{} for _ in range(record.num_datums)]
    for name, field in record.fields.items():
        offsets = _numbers(field.offsets, _I64, "offsets").tolist()
        if len(offsets) != record.num_datums + 1:
            raise ValueError(f"{name}: {len(offsets)} offsets for {record.num_datums} datums")
        trailing = list(field.trailing_shape)
        item_size = max(1, math.prod(trailing))
        data = memoryview(field.data)  # copied out of the message once, not per datum
        for index, output in enumerate(outputs):
            values, dtype = _widened(data[offsets[index] : offsets[index + 1]], field.dtype)
            output[name] = TensorData(data=values, dtype=dtype, shape=[values.size // item_size, *trailing])
    return outputs


# ---- asample: result ----


def encode_sample_response(response: SampleResponse) -> bytes:
    """Encodes the result without sequence ids, which the response to the submission contains."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        entry = message.sequences.add()
        entry.stop_reason = pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH
        entry.tokens = np.ascontiguousarray(sequence.tokens_np, dtype=_I32).tobytes()
        if sequence.logprobs_np is not None:
            entry.logprobs = np.ascontiguousarray(sequence.logprobs_np, dtype=_F32).tobytes()
        if sequence.topk_logprobs_np is not None:
            _write_topk(entry.topk_sampled_logprobs, sequence.topk_logprobs_np)
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = np.ascontiguousarray(response.prompt_logprobs_np, dtype=_F32).tobytes()
    if response.topk_prompt_logprobs_np is not None:
        _write_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs_np)
    if response.target_prompt_logprobs is not None:
        write_tensor(message.target_prompt_logprobs, response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        write_tensor(message.prompt_alt_tokens.tokens, response.prompt_alt_tokens.tokens)
        write_tensor(message.prompt_alt_tokens.logprobs, response.prompt_alt_tokens.logprobs)
    return message.SerializeToString()


def decode_sample_response(data: bytes, sequence_ids: Sequence[str] | None) -> SampleResponse:
    """Decodes a result; ``sequence_ids`` are those of the response to the submission, None if they are not known."""
    message = _parse(pb.SampleResponse, data)
    if sequence_ids is None:
        sequence_ids = [""] * len(message.sequences)
    if len(message.sequences) != len(sequence_ids):
        raise Malformed(
            f"the server returned {len(message.sequences)} sequences but announced {len(sequence_ids)}"
        )
    try:
        alternatives = None
        if message.HasField("prompt_alt_tokens"):
            alternatives = PromptAltTokens(
                _read_tensor(message.prompt_alt_tokens.tokens),
                _read_tensor(message.prompt_alt_tokens.logprobs),
            )
        return SampleResponse(
            sequences=[_read_sequence(s, i) for s, i in zip(message.sequences, sequence_ids, strict=True)],
            prompt_logprobs_np=_numbers(message.prompt_logprobs, _F32, "prompt_logprobs")
            if message.HasField("prompt_logprobs")
            else None,
            topk_prompt_logprobs_np=_read_topk(message.topk_prompt_logprobs)
            if message.HasField("topk_prompt_logprobs")
            else None,
            target_prompt_logprobs=_read_tensor(message.target_prompt_logprobs)
            if message.HasField("target_prompt_logprobs")
            else None,
            prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
            prompt_alt_tokens=alternatives,
        )
    except ValueError as error:
        raise Malformed(f"sample response: {error}") from error


def _read_sequence(message: Any, sequence_id: str) -> SampledSequence:
    if message.stop_reason not in (pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH):
        raise ValueError(f"unknown stop reason {message.stop_reason}")
    return SampledSequence(
        stop_reason="stop" if message.stop_reason == pb.STOP_REASON_STOP else "length",
        sequence_id=sequence_id,
        tokens_np=_numbers(message.tokens, _I32, "tokens"),
        logprobs_np=_numbers(message.logprobs, _F32, "logprobs") if message.logprobs else None,
        topk_logprobs_np=_read_topk(message.topk_sampled_logprobs)
        if message.HasField("topk_sampled_logprobs")
        else None,
    )


def _write_topk(message: Any, table: TopkLogprobs) -> None:
    message.length, message.k = table.token_ids.shape
    message.token_ids = np.ascontiguousarray(table.token_ids, dtype=_I32).tobytes()
    message.logprobs = np.ascontiguousarray(table.logprobs, dtype=_F32).tobytes()


def _read_topk(message: Any) -> TopkLogprobs:
    shape = (message.length, message.k)
    ids = _numbers(message.token_ids, _I32, "top-k token ids")
    logprobs = _numbers(message.logprobs, _F32, "top-k logprobs")
    if ids.size != logprobs.size or ids.size != message.length * message.k:
        raise ValueError(f"a top-k table of shape {shape} has {ids.size} ids and {logprobs.size} logprobs")
    return TopkLogprobs(ids.reshape(shape), logprobs.reshape(shape))


def _parse(kind: Any, data: bytes) -> Any:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Malformed(f"the body is not a {kind.DESCRIPTOR.name} message: {error}") from error
    return message
