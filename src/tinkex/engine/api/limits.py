"""Limits on what comes in: the size of a body, also once it is unpacked, and the size of a page."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping

from starlette.requests import ClientDisconnect, Request

from tinkex.errors import InvalidInput, TooLarge, Unsupported

MAX_PAGE = 1000

_PAGE = frozenset({"limit", "offset"})
_SCOPE = frozenset({"access_scope"})
QUERIES: Mapping[str, frozenset[str]] = {
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
"""What may be asked behind the ``?`` of an address; everything else would change nothing, and is refused."""


START = 64 * 1024
"""So much of a body that is too large is looked at, to see which operation it would have been."""


class BodyTooLarge(TooLarge):
    """A body is larger than the limit; ``start`` is what it begins with, unpacked."""

    def __init__(self, max_bytes: int, start: bytes = b"") -> None:
        super().__init__(
            f"the body of this call is larger than {max_bytes} bytes, which is this server's limit; send less at once."
        )
        self.start = start


class Stalled(ClientDisconnect):
    """The caller stopped in the middle of its body: as good as gone, but it may hear why."""


async def arriving(request: Request, stall_s: float | None) -> AsyncIterator[bytes]:
    """The body of a request piece by piece; :class:`Stalled` when the next one does not come in time."""
    pieces = request.stream()
    while True:
        try:
            async with asyncio.timeout(stall_s):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            raise Stalled(
                f"the body of this call stood still for {stall_s:g} s, which is this server's limit; send it again."
            ) from error
        if piece is None:
            return
        yield piece


async def read_body(
    request: Request, max_bytes: int, stall_s: float | None = None, *, is_numbered: bool = False
) -> bytes:
    """The body of a request, unpacked; :class:`BodyTooLarge` as soon as it is clear that it is.

    Of one that holds a number the start is read all the same.
    """
    announced = request.headers.get("content-length", "")
    most = max_bytes
    if announced.isdigit() and int(announced) > max_bytes:
        if not is_numbered:
            raise BodyTooLarge(max_bytes)
        most = 0
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    is_packed = encoding not in {"", "identity"}
    parts: list[bytes] = []
    size = 0
    async for part in arriving(request, stall_s):
        size += len(part)
        parts.append(part)
        if size > most:
            start = b"".join(parts)[:START]
            raise BodyTooLarge(max_bytes, _unpacked(start, encoding, START) if is_packed else start)
    body = b"".join(parts)
    return unpack(body, encoding, max_bytes) if is_packed else body


def unpack(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """A compressed body, unpacked, but never more than ``max_bytes`` of it.

    >>> unpack(zlib.compress(b"hello"), "deflate", 100)
    b'hello'
    """
    unpacked = _unpacked(body, encoding, max_bytes + 1)
    if len(unpacked) > max_bytes:
        raise BodyTooLarge(max_bytes, unpacked[:START])
    return unpacked


def _unpacked(body: bytes, encoding: str, most: int) -> bytes:
    if encoding == "zstd":
        return _unpack_zstd(body, most)
    if encoding in {"gzip", "deflate"}:
        return _unpack_zlib(body, most)
    raise Unsupported(
        f"this server does not read bodies with Content-Encoding {encoding!r}; use zstd or gzip."
    )


def _unpack_zstd(body: bytes, max_bytes: int) -> bytes:
    import zstandard

    try:
        return zstandard.ZstdDecompressor().stream_reader(body).read(max_bytes)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"the body says it is zstd, but is not: {error}") from error


def _unpack_zlib(body: bytes, max_bytes: int) -> bytes:
    try:
        # 32 lets zlib find out by itself whether the header is gzip's or its own.
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, max_bytes)
    except zlib.error as error:
        raise InvalidInput(f"the body says it is gzip or deflate, but is not: {error}") from error


def check_query(endpoint: str, query: Mapping[str, str]) -> None:
    """Refuse what an endpoint does not know.

    >>> check_query("get_session", {"access_scope": "owned"})
    >>> check_query("get_session", {"acces_scope": "owned"})
    Traceback (most recent call last):
      ...
    tinkex.errors.InvalidInput: get_session knows no query parameter 'acces_scope'; it takes access_scope.
    """
    known = QUERIES.get(endpoint, frozenset())
    for name in query:
        if name not in known:
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise InvalidInput(f"{endpoint} knows no query parameter {name[:100]!r}; {takes}.")


def page(query: Mapping[str, str], default_limit: int) -> tuple[int, int]:
    """The ``limit`` and ``offset`` of a listing.

    >>> page({"offset": "40"}, default_limit=20)
    (20, 40)
    """
    limit, offset = _number(query, "limit", default_limit), _number(query, "offset", 0)
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidInput(
            f"limit is {limit}; ask for 1 to {MAX_PAGE} entries, and for the rest with offset."
        )
    if offset < 0:
        raise InvalidInput(f"offset is {offset}; it starts at 0.")
    return limit, offset


def wants_accessible(query: Mapping[str, str]) -> bool:
    """Whether ``access_scope`` asks for what others have published as well.

    >>> wants_accessible({}), wants_accessible({"access_scope": "accessible"})
    (False, True)
    """
    scope = query.get("access_scope", "owned")
    if scope not in {"owned", "accessible"}:
        raise InvalidInput(f"access_scope is {scope!r}; it is owned or accessible.")
    return scope == "accessible"


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{name} is {text!r}; give a whole number.") from None
