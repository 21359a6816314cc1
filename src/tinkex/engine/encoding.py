"""Requests and outcomes in the form they are stored and sent: protobuf for passes and samples, JSON for the rest."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping
from typing import Any

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.operation import REQUEST_TYPES, Kind, Operation, OperationRequest
from tinkex.engine.store import Outcome, ResultFormat, Store
from tinkex.errors import EngineError, EngineFailure, RequestErrorCategory
from tinkex.types import ForwardBackwardRequest, OptimStepResponse, SampleResponse
from tinkex.types.base import Value
from tinkex.types.plain import finite_or_text

_HEADER_BYTES = 32


def encode_request(request: OperationRequest) -> bytes:
    """A request as it is recorded."""
    if isinstance(request, ForwardBackwardRequest):
        return wire_proto.encode_forward_backward(request)
    return wire_json.encode(request)


def decode_request(kind: Kind, recorded: bytes) -> OperationRequest:
    """The request in a recorded body; raises ``ValueError`` if it is not of this kind.

    >>> from tinkex.types import UnloadModelRequest
    >>> decode_request(Kind.UNLOAD, encode_request(UnloadModelRequest(model_id="m"))).model_id
    'm'
    """
    body = expand(recorded)
    if kind.packs:
        return wire_proto.decode_forward_backward(body)
    return wire_json.decode(body, REQUEST_TYPES[kind])


def read_request(store: Store, operation: Operation) -> OperationRequest:
    """The request of an operation: from memory, or from disk if it was not kept there."""
    if operation.request is not None:
        return operation.request
    try:
        if operation.kind is Kind.SAMPLE:
            recorded = store.futures.request(operation.request_id)
        else:
            row = store.journal.get(operation.request_id)
            recorded = row.body if row is not None and row.intact else None
        if recorded is None:
            raise ValueError("it is missing or corrupt")
        return decode_request(operation.kind, recorded)
    except (ValueError, sqlite3.Error) as error:
        raise EngineFailure(
            f"the request of operation {operation.request_id} cannot be read from the server's disk ({error}); it was not run and "
            "changed nothing. Submit it again."
        ) from error


def compact(body: bytes, sent: bytes, encoding: str) -> bytes:
    """A body as it is recorded: as it was sent, with its content encoding, if that is smaller.

    No request begins with a zero byte: JSON does not, and protobuf has no field 0.

    >>> recorded = compact(b"a" * 1000, zlib.compress(b"a" * 1000), "deflate")
    >>> len(recorded), body_size(recorded), expand(recorded) == b"a" * 1000
    (31, 1000, True)
    """
    if not encoding or len(sent) + _HEADER_BYTES >= len(body):
        return body
    return b"\0%s %d\0" % (encoding.encode(), len(body)) + sent


def body_size(recorded: bytes) -> int:
    """The size of a recorded body when it is expanded."""
    return int(_split(recorded)[1]) if recorded[:1] == b"\0" else len(recorded)


def expand(recorded: bytes) -> bytes:
    """The body in its recorded form; raises ``ValueError`` if it cannot be expanded."""
    if recorded[:1] != b"\0":
        return recorded
    encoding, size, sent = _split(recorded)
    if encoding == b"zstd":
        import zstandard

        try:
            body = zstandard.ZstdDecompressor().stream_reader(sent).read(int(size))
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
    else:
        try:
            body = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(sent, int(size))
        except zlib.error as error:
            raise ValueError(str(error)) from error
    if len(body) != int(size):
        raise ValueError(f"{len(body)} instead of {int(size)} bytes")
    return body


def _split(recorded: bytes) -> tuple[bytes, bytes, bytes]:
    """The encoding, the size when expanded, and the rest of a compact body."""
    header, _, sent = recorded[1:].partition(b"\0")
    encoding, _, size = header.partition(b" ")
    return encoding, size, sent


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
