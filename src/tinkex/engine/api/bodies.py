"""Request bodies: received within limits on size and time, decompressed and decoded; large ones on threads.

Everything is bounded before it costs memory: the bytes received, the bytes after decompression, the ratio of the two, and
the number of values, which is counted before any object is built.
"""

from __future__ import annotations

import asyncio
import functools
import types
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request

from tinkex._wire.counting import CONTAINER_VALUES
from tinkex._wire.endpoints import Endpoint
from tinkex.engine.api.body_budget import BodyBudget, BodyReservation
from tinkex.engine.api.decoding import count_values, decode_request, is_proto, read_seq_id
from tinkex.engine.api.limits import BodyLimit, body_limit
from tinkex.engine.encoding import compact
from tinkex.engine.user_threads import UserThreads
from tinkex.errors import EngineError, InvalidInput, TooLarge, Unsupported

T = TypeVar("T")

MIN_BYTES_PER_S = 8 * 1024
"""The rate at which a body must arrive on average, after the first ``request_stall_s``."""
MAX_EXPANSION = 100
"""How many times larger than its compressed form a body may be."""
MIN_EXPANDED_BYTES = 1024 * 1024
"""Up to this size any expansion is accepted: short texts of repeated values compress well."""
MAX_WINDOW_BYTES = 8 * 1024 * 1024
"""The memory that a zstd frame may require, which is what RFC 9659 allows for the content encoding."""
STEP_BYTES = 1024 * 1024

MAX_LOOP_BYTES = 64 * 1024
MAX_LOOP_VALUES = 16 * 1024
"""What is decoded on the event loop, in a few milliseconds at most; the rest is decoded on a thread."""

BODIES_PER_USER, BODIES_IN_TOTAL = 2, 8
"""How many bodies of the largest size may be in memory at the same time."""

DECODING_THREADS = 2

PREFIX_BYTES = 64 * 1024
"""How much of a body that is too large is read, to find its seq_id."""


class BodyStalled(ClientDisconnect):
    """The client stopped sending in the middle of the body, or sends too slowly; it gets a 408."""


class RejectedBody(Exception):
    """A body was rejected with ``error``; ``sequence`` is the run and seq_id that it uses up, if they could be read."""

    def __init__(self, error: EngineError, sequence: tuple[str, int] | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.sequence = sequence


class DecodedBody(NamedTuple):
    """The request in a body, and the body as it is recorded if its request is accepted."""

    request: Any
    body: bytes


class RequestBodyReader:
    """Reads the bodies of one application's requests, within a budget of bytes per user and in total."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self.budget = BodyBudget(BODIES_PER_USER * max_body_bytes, BODIES_IN_TOTAL * max_body_bytes)
        self._threads = UserThreads(DECODING_THREADS, "tinkex-decode")

    async def read(
        self,
        request: Request,
        headers: Mapping[str, str],
        endpoint: Endpoint,
        stall_s: float | None,
        reservation: BodyReservation,
    ) -> DecodedBody:
        """Returns the request in a body; raises :class:`RejectedBody` if it is too large or invalid."""
        limit = body_limit(endpoint.name, self._max_body_bytes)
        encoding = headers.get("content-encoding", "").strip().lower()
        encoding = "" if encoding == "identity" else encoding
        content_type = headers.get("content-type", "")
        find_sequence = functools.partial(_find_sequence, endpoint, encoding, content_type)
        content_length = headers.get("content-length", "")
        body = await _receive(
            request, content_length, endpoint, limit.max_bytes, stall_s, reservation.add, find_sequence
        )
        max_values = min(limit.max_values, MAX_LOOP_VALUES)
        if (
            not encoding
            and len(body) <= MAX_LOOP_BYTES
            and count_values(endpoint, body, content_type, max_values) <= max_values
        ):  # decoding it takes no longer than handing it to a thread may cost
            return _decode_counted(endpoint, body, body, encoding, content_type)
        decode = functools.partial(_decode, endpoint, limit, body, encoding, content_type, reservation.add)
        return await asyncio.wrap_future(self._threads.submit(reservation.owner, decode))


async def _receive(
    request: Request,
    content_length: str,
    endpoint: Endpoint,
    max_bytes: int,
    stall_s: float | None,
    reserve: Callable[[int], None],
    find_sequence: Callable[[bytes], tuple[str, int] | None],
) -> bytes:
    """Returns the body as it was sent; raises :class:`RejectedBody` as early as possible if it is too large."""
    limit = max_bytes
    if content_length.isdigit() and int(content_length) > max_bytes:
        if not endpoint.is_future:
            raise RejectedBody(_too_large(max_bytes))
        limit = 0  # its start is read, which has the seq_id
    chunks: list[bytes] = []
    size = 0
    started, more = asyncio.get_running_loop().time(), True
    while more:
        chunk, more = await _next_chunk(request, started, size, stall_s)
        size += len(chunk)
        chunks.append(chunk)
        if size > limit:
            prefix = b"".join(chunks)[:PREFIX_BYTES]
            raise RejectedBody(_too_large(max_bytes), find_sequence(prefix))
        reserve(len(chunk))
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def stream_body(request: Request, stall_s: float | None) -> AsyncIterator[bytes]:
    """Yields the body of a request in chunks.

    Raises :class:`BodyStalled` if no chunk arrives within ``stall_s``, or the whole body takes longer than ``stall_s`` and
    the time that its size allows.
    """
    started = asyncio.get_running_loop().time()
    size, more = 0, True
    while more:
        chunk, more = await _next_chunk(request, started, size, stall_s)
        size += len(chunk)
        if chunk:
            yield chunk


async def _next_chunk(
    request: Request, started: float, size: int, stall_s: float | None
) -> tuple[bytes, bool]:
    """Returns the next part of a body, and whether there are more; ``size`` is what has arrived since ``started``."""
    # Most bodies have arrived with their head: a timer is only started for those that have not.
    receiving = request.receive().__await__()
    try:
        awaited = next(receiving)
    except StopIteration as received:
        message = received.value
    else:
        deadline = None
        if stall_s is not None:
            now = asyncio.get_running_loop().time()
            deadline = min(now, started + size / MIN_BYTES_PER_S) + stall_s
        try:
            async with asyncio.timeout_at(deadline):
                message = await _resume(receiving, awaited)
        except TimeoutError as error:
            raise BodyStalled(
                f"no data of this request's body arrived for {stall_s:g} s, or less than {MIN_BYTES_PER_S} bytes per "
                "second, which is this server's limit; send it again."
            ) from error
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


@types.coroutine
def _resume(awaiting: Generator[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Continue to await what waits for ``awaited``."""
    while True:
        try:
            sent = yield awaited
        except BaseException as error:  # noqa: BLE001 -- a cancellation
            step = functools.partial(awaiting.throw, error)
        else:
            step = functools.partial(awaiting.send, sent)
        try:
            awaited = step()
        except StopIteration as ended:
            value: T = ended.value
            return value


def _decode(
    endpoint: Endpoint,
    limit: BodyLimit,
    body: bytes,
    encoding: str,
    content_type: str,
    reserve: Callable[[int], None],
) -> DecodedBody:
    sent = body
    if encoding:
        try:
            body = decompress(body, encoding, limit.max_bytes)
        except TooLarge as error:
            raise RejectedBody(error, _find_sequence(endpoint, encoding, content_type, body)) from None
        except EngineError as error:
            raise RejectedBody(error) from None
        reserve(len(body))
    if count_values(endpoint, body, content_type, limit.max_values) > limit.max_values:
        too_many = TooLarge(
            f"the body of {endpoint.name} has more than {limit.max_values} values (an object or a list counts as "
            f"{CONTAINER_VALUES}), which is this server's limit; send less per request."
        )
        raise RejectedBody(too_many, _find_sequence(endpoint, "", content_type, body))
    return _decode_counted(endpoint, body, sent, encoding, content_type)


def _decode_counted(
    endpoint: Endpoint, body: bytes, sent: bytes, encoding: str, content_type: str
) -> DecodedBody:
    """Decodes a body whose values have been counted."""
    try:
        return DecodedBody(decode_request(endpoint, body, content_type), compact(body, sent, encoding))
    except InvalidInput as error:
        raise RejectedBody(error, read_seq_id(body, content_type) if endpoint.is_future else None) from error


def _find_sequence(
    endpoint: Endpoint, encoding: str, content_type: str, body: bytes
) -> tuple[str, int] | None:
    """The run and seq_id of a body that is too large to be decoded, if its endpoint has them."""
    if not endpoint.is_future:
        return None
    if encoding:
        try:
            body = _expand(body[:PREFIX_BYTES], encoding, PREFIX_BYTES)
        except EngineError:
            return None
    # JSON is searched without building objects; protobuf has both fields at its start.
    return read_seq_id(body[:PREFIX_BYTES] if is_proto(content_type) else body, content_type)


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Returns a decompressed body; raises :class:`TooLarge` if it has more than ``max_bytes``, or expands too much.

    >>> decompress(zlib.compress(b"hello"), "deflate", 100)
    b'hello'
    """
    max_expanded = max(MIN_EXPANDED_BYTES, MAX_EXPANSION * len(body))
    limit = min(max_bytes, max_expanded)
    expanded = _expand(body, encoding, limit + 1)
    if len(expanded) <= limit:
        return expanded
    if limit == max_bytes:
        raise _too_large(max_bytes)
    raise TooLarge(
        f"the body of this request expands to more than {MAX_EXPANSION} times its compressed size, which is this server's "
        f"limit for bodies above {MIN_EXPANDED_BYTES} bytes; send it without Content-Encoding."
    )


def _expand(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Returns at most ``max_bytes`` of a decompressed body."""
    if encoding == "zstd":
        return _expand_zstd(body, max_bytes)
    if encoding in {"gzip", "deflate"}:
        return _expand_zlib(body, max_bytes)
    raise Unsupported(f"Content-Encoding {encoding[:100]!r} is not supported; use zstd or gzip.")


def _expand_zstd(body: bytes, max_bytes: int) -> bytes:
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body)
    parts: list[bytes] = []
    try:
        # In steps, because the reader allocates the requested size in advance.
        while max_bytes and (part := reader.read(min(max_bytes, STEP_BYTES))):
            parts.append(part)
            max_bytes -= len(part)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"Content-Encoding is zstd, but the body is not valid zstd: {error}") from error
    return b"".join(parts)


def _expand_zlib(body: bytes, max_bytes: int) -> bytes:
    try:
        # 32 lets zlib detect whether the header is gzip or zlib.
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, max_bytes)
    except zlib.error as error:
        raise InvalidInput(f"Content-Encoding is gzip or deflate, but the body is not: {error}") from error


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(
        f"the body of this request is larger than this server's limit of {max_bytes} bytes; send less per request."
    )
