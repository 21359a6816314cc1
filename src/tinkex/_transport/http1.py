"""HTTP/1.1 messages: writes the head of a request, reads the head and the framing of a response."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

if TYPE_CHECKING:
    from tinkex._transport.base import Request

__all__ = [
    "CHUNKED",
    "MAX_BODY_BYTES",
    "ResponseHead",
    "accepted_encodings",
    "decompress",
    "parse_head",
    "parse_size",
    "request_head",
    "stream_decompressor",
]

MAX_BODY_BYTES = 4 * 1024**3
"""Of a response that is read as a whole; streams have no limit."""
CHUNKED = -1


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
    """The body of a response without its content encoding; ``ValueError`` if it cannot be undone."""
    if encoding is None or not body or encoding == "identity":
        return body
    if encoding in {"gzip", "x-gzip", "deflate"}:
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        try:
            content = decompressor.decompress(body, MAX_BODY_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if not decompressor.eof:
            raise ValueError("it is truncated")
        return content
    if encoding == "zstd":
        try:
            import zstandard
        except ModuleNotFoundError:
            raise ValueError("the package zstandard is missing") from None

        try:
            return zstandard.ZstdDecompressor().decompressobj().decompress(body)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
    raise ValueError(f"the encoding {encoding!r} was not requested")


def stream_decompressor(encoding: str) -> zlib._Decompress | None:
    """What undoes the content encoding of a stream; None for none. Streams request none, but proxies may compress."""
    if encoding in {"", "identity"}:
        return None
    if encoding in {"gzip", "x-gzip", "deflate"}:
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    raise ValueError(f"the encoding {encoding!r} was not requested")
