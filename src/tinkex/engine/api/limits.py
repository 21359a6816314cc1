"""Limits on requests: body size, also when decompressed, body stalls, query parameters and page size."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping

from starlette.requests import ClientDisconnect, Request

from tinkex.errors import InvalidInput, TooLarge, Unsupported

MAX_PAGE = 1000

_PAGE = frozenset({"limit", "offset"})
_SCOPE = frozenset({"access_scope"})
QUERY_PARAMETERS: Mapping[str, frozenset[str]] = {
    "list_sessions": _PAGE | _SCOPE,
    "get_session": _SCOPE,
    "list_training_runs": _PAGE | _SCOPE | {"project_id"},
    "get_training_run": _SCOPE,
    "list_user_checkpoints": _PAGE,
    "list_assets": _PAGE,
    "tokenizer_file": frozenset({"model"}),
    "audit_log": frozenset({"event_type", "day"}),
    "billing_usage": frozenset({"starting_on", "ending_before"}),
    "checkpoint_storage_usage": frozenset({"project_id"}),
}
"""The query parameters of each endpoint; others are rejected."""


PREFIX_BYTES = 64 * 1024
"""How much of a body that is too large is read, to find its seq_id."""


class BodyTooLarge(TooLarge):
    """A body is larger than the limit; ``prefix`` is its start, decompressed."""

    def __init__(self, max_bytes: int, prefix: bytes = b"") -> None:
        super().__init__(
            f"the body of this request is larger than this server's limit of {max_bytes} bytes; send less per request."
        )
        self.prefix = prefix


class BodyStalled(ClientDisconnect):
    """The client stopped sending in the middle of the body; it gets a 408."""


async def stream_body(request: Request, stall_s: float | None) -> AsyncIterator[bytes]:
    """Yields the body of a request in chunks; raises :class:`BodyStalled` if no chunk arrives within ``stall_s``."""
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(stall_s):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise BodyStalled(
                f"no data of this request's body arrived for {stall_s:g} s, which is this server's limit; send it again."
            ) from error
        if chunk is None:
            return
        yield chunk


async def read_body(
    request: Request, max_bytes: int, stall_s: float | None = None, *, has_seq_id: bool = False
) -> bytes:
    """Returns the body of a request, decompressed; raises :class:`BodyTooLarge` as early as possible.

    The start of a body with a seq_id is read even if Content-Length is too large.
    """
    content_length = request.headers.get("content-length", "")
    limit = max_bytes
    if content_length.isdigit() and int(content_length) > max_bytes:
        if not has_seq_id:
            raise BodyTooLarge(max_bytes)
        limit = 0
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    is_compressed = encoding not in {"", "identity"}
    chunks: list[bytes] = []
    size = 0
    async for chunk in stream_body(request, stall_s):
        size += len(chunk)
        chunks.append(chunk)
        if size > limit:
            prefix = b"".join(chunks)[:PREFIX_BYTES]
            if is_compressed:
                prefix = _decompress(prefix, encoding, PREFIX_BYTES)
            raise BodyTooLarge(max_bytes, prefix)
    body = b"".join(chunks)
    return decompress(body, encoding, max_bytes) if is_compressed else body


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Returns a decompressed body; raises :class:`BodyTooLarge` if it has more than ``max_bytes``.

    >>> decompress(zlib.compress(b"hello"), "deflate", 100)
    b'hello'
    """
    decompressed = _decompress(body, encoding, max_bytes + 1)
    if len(decompressed) > max_bytes:
        raise BodyTooLarge(max_bytes, decompressed[:PREFIX_BYTES])
    return decompressed


def _decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding == "zstd":
        return _decompress_zstd(body, max_bytes)
    if encoding in {"gzip", "deflate"}:
        return _decompress_zlib(body, max_bytes)
    raise Unsupported(f"Content-Encoding {encoding!r} is not supported; use zstd or gzip.")


def _decompress_zstd(body: bytes, max_bytes: int) -> bytes:
    import zstandard

    try:
        return zstandard.ZstdDecompressor().stream_reader(body).read(max_bytes)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"Content-Encoding is zstd, but the body is not valid zstd: {error}") from error


def _decompress_zlib(body: bytes, max_bytes: int) -> bytes:
    try:
        # 32 lets zlib detect whether the header is gzip or zlib.
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, max_bytes)
    except zlib.error as error:
        raise InvalidInput(f"Content-Encoding is gzip or deflate, but the body is not: {error}") from error


def check_query(endpoint: str, query: Mapping[str, str]) -> None:
    """Reject query parameters that an endpoint does not have.

    >>> check_query("get_session", {"access_scope": "owned"})
    >>> check_query("get_session", {"acces_scope": "owned"})
    Traceback (most recent call last):
      ...
    tinkex.errors.InvalidInput: get_session has no query parameter 'acces_scope'; it takes access_scope.
    """
    known = QUERY_PARAMETERS.get(endpoint, frozenset())
    for name in query:
        if name not in known:
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise InvalidInput(f"{endpoint} has no query parameter {name[:100]!r}; {takes}.")


def page(query: Mapping[str, str], default_limit: int) -> tuple[int, int]:
    """Returns the ``limit`` and ``offset`` of a listing.

    >>> page({"offset": "40"}, default_limit=20)
    (20, 40)
    """
    limit, offset = _number(query, "limit", default_limit), _number(query, "offset", 0)
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidInput(f"limit is {limit}; it must be 1 to {MAX_PAGE}. Use offset for further pages.")
    if offset < 0:
        raise InvalidInput(f"offset is {offset}; it must not be negative.")
    return limit, offset


def wants_accessible(query: Mapping[str, str]) -> bool:
    """Returns whether ``access_scope`` includes what other users have published.

    >>> wants_accessible({}), wants_accessible({"access_scope": "accessible"})
    (False, True)
    """
    scope = query.get("access_scope", "owned")
    if scope not in {"owned", "accessible"}:
        raise InvalidInput(f"access_scope is {scope!r}; it must be owned or accessible.")
    return scope == "accessible"


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{name} is {text!r}; it must be an integer.") from None
