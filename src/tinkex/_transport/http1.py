"""HTTP/1.1 messages: writes the head of a request, reads the head and the framing of a response."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

from tinkex.errors import APIResponseValidationError, HttpRequest, HttpResponse

if TYPE_CHECKING:
    from tinkex._transport.base import Request

__all__ = [
    "CHUNKED",
    "MAX_BODY_BYTES",
    "ReplyTooLarge",
    "ResponseHead",
    "accepted_encodings",
    "decompress",
    "parse_head",
    "parse_size",
    "read_decompressed",
    "reply_too_large",
    "request_head",
    "stream_decompressor",
]

MAX_BODY_BYTES = 4 * 1024**3
"""Of a response that is read as a whole; streams have no limit."""
MAX_EXPANSION = 100
"""How many times larger than its compressed form a response may be…"""
MIN_EXPANDED_BYTES = 64 * 1024**2
"""…unless it has at most this size."""
MAX_WINDOW_BYTES = 8 * 1024**2
"""The memory that a zstd frame may require, which is what RFC 9659 allows for the content encoding."""
STEP_BYTES = 1024**2
CHUNKED = -1


class ReplyTooLarge(Exception):
    """A compressed response expands to more than is accepted; sending the request again would not help."""

    status = 0
    """The status of the response."""


class ResponseHead(NamedTuple):
    """The first part of a response. A status below 200 is an interim response: the real one follows."""

    status: int
    headers: dict[str, str]
    """Names are in lower case; values of repeated headers are joined by commas."""
    body_bytes: int | None
    """The size of the body; ``CHUNKED`` if it comes in chunks, None if it ends with the connection."""


def parse_head(head: str, method: str) -> ResponseHead:
    r"""Reads status line and headers of a response to a request with this method; ``ValueError`` says what is wrong.

    >>> parse_head("HTTP/1.1 200 OK\r\nContent-Length: 2", "GET")
    ResponseHead(status=200, headers={'content-length': '2'}, body_bytes=2)
    """
    first, *lines = head.split("\r\n")
    if not first.startswith("HTTP/1.") or not first[9:12].isdigit():
        raise ValueError("no status line")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError("a header without a colon")
        name = name.strip().lower()
        headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    if first.startswith("HTTP/1.0"):
        headers.setdefault("connection", "close")
    status = int(first[9:12])
    body_bytes: int | None
    if method == "HEAD" or status < 200 or status in {204, 304}:
        body_bytes = 0
    elif "chunked" in headers.get("transfer-encoding", ""):
        body_bytes = CHUNKED
    elif (length := headers.get("content-length")) is not None:
        body_bytes = parse_size(length.encode("latin-1"), 10)
    else:
        body_bytes = None
    return ResponseHead(status, headers, body_bytes)


def parse_size(digits: bytes, base: int) -> int:
    """Reads a number of bytes; unlike ``int`` it takes neither signs nor underscores nor spaces.

    >>> parse_size(b"1f", 16)
    31
    """
    try:
        if digits.isalnum():
            return int(digits, base)
    except ValueError:
        pass
    raise ValueError(f"the size {digits[:20]!r} is not a number")


def request_head(request: Request, prefix: str, common: str, framing: str) -> bytes:
    """Request line and headers: ``common`` to all requests of a connection, the request's own, and those of its body."""
    query = f"?{urlencode(request.query)}" if request.query else ""
    lines = "".join([f"{name}: {value}\r\n" for name, value in request.headers.items()])
    head = f"{request.method} {prefix}{request.path}{query} HTTP/1.1\r\n{common}{lines}{framing}\r\n"
    return head.encode("latin-1")


def accepted_encodings() -> str:
    """The value of ``accept-encoding``: what :func:`decompress` can undo here."""
    from importlib.util import find_spec

    return "gzip, deflate, zstd" if find_spec("zstandard") else "gzip, deflate"


def decompress(body: bytes, encoding: str | None) -> bytes:
    """The body of a response without its content encoding.

    Raises ``ValueError`` if it cannot be undone, and :class:`ReplyTooLarge` as soon as it expands too much.

    >>> decompress(zlib.compress(b"hello"), "deflate")
    b'hello'
    """
    if encoding is None or not body or encoding == "identity":
        return body
    max_bytes = max(MIN_EXPANDED_BYTES, MAX_EXPANSION * len(body))
    if encoding in {"gzip", "x-gzip", "deflate"}:
        content = _expand_zlib(body, max_bytes)
    elif encoding == "zstd":
        content = _expand_zstd(body, max_bytes)
    else:
        raise ValueError(f"the encoding {encoding!r} was not requested")
    if len(content) > max_bytes:
        raise ReplyTooLarge(
            f"{len(body):,} compressed bytes expand to more than {max_bytes:,}; the limit is {MAX_EXPANSION} times the "
            f"compressed size, or {MIN_EXPANDED_BYTES:,} bytes if that is more"
        )
    return content


def reply_too_large(about: HttpRequest, error: ReplyTooLarge) -> APIResponseValidationError:
    """The error that callers get for a response that expands too much."""
    response = HttpResponse(error.status, request=about)
    return APIResponseValidationError(response, None, f"the reply of {about.url} was rejected: {error}")


def _expand_zlib(body: bytes, max_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        content = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not decompressor.eof and len(content) <= max_bytes:
        raise ValueError("it is truncated")
    return content


def _expand_zstd(body: bytes, max_bytes: int) -> bytes:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ValueError("the package zstandard is missing") from None

    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body)
    content = bytearray()
    try:
        # In steps, because the reader allocates the requested size in advance.
        while len(content) <= max_bytes and (part := reader.read(STEP_BYTES)):
            content += part
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    return bytes(content)


async def read_decompressed(
    decompressor: zlib._Decompress | None, read_raw: Callable[[], Awaitable[bytes]]
) -> bytes:
    """Returns the next chunk of a stream, at most ``STEP_BYTES`` if it is compressed; empty at its end."""
    if decompressor is None:
        return await read_raw()
    while compressed := decompressor.unconsumed_tail or await read_raw():
        try:
            if chunk := decompressor.decompress(compressed, STEP_BYTES):
                return chunk
        except zlib.error as error:
            raise ValueError(f"the body cannot be decompressed: {error}") from error
    if not decompressor.eof:
        raise EOFError
    return b""


def stream_decompressor(encoding: str) -> zlib._Decompress | None:
    """What undoes the content encoding of a stream; None for none. Streams request none, but proxies may compress."""
    if encoding in {"", "identity"}:
        return None
    if encoding in {"gzip", "x-gzip", "deflate"}:
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    raise ValueError(f"the encoding {encoding!r} was not requested")
