"""Pages of listings and searches: bounded in bytes as well as in items, with metadata that every client reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tinkex._wire import json as wire_json
from tinkex.types.base import Value

__all__ = ["BATCH", "MAX_PAGE_BYTES", "rows_from", "take_page", "text_values"]

MAX_PAGE_BYTES = 1024 * 1024
"""A page ends before it is larger, unless a single item is."""
BATCH = 16
"""Rows read at a time: each may have metadata of 64 KiB, those of older versions of megabytes."""

_Row = TypeVar("_Row")
_Item = TypeVar("_Item", bound=Value)


def take_page(found: Iterator[tuple[_Row, _Item]], limit: int) -> tuple[list[tuple[_Row, _Item]], bool]:
    """Returns the items of a page with their rows, and whether there are no others."""
    page: list[tuple[_Row, _Item]] = []
    num_bytes = 0
    for row, item in found:
        num_bytes += len(wire_json.encode(item))
        if page and (len(page) >= limit or num_bytes > MAX_PAGE_BYTES):
            return page, False
        page.append((row, item))
    return page, True


def rows_from(read: Callable[[int, int], Sequence[_Row]], limit: int, offset: int) -> Iterator[_Row]:
    """Yields the rows of ``read(limit, offset)``, a few of which are in memory at a time.

    >>> list(rows_from(lambda limit, offset: range(40)[offset : offset + limit], 20, 5)) == list(range(5, 25))
    True
    """
    end = offset + limit
    while offset < end and (batch := read(min(BATCH, end - offset), offset)):
        yield from batch
        offset += len(batch)


def text_values(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata with text as values, or the JSON of others: official clients read only text, and fail on a whole listing.

    >>> text_values({"stage": "sft", "step": 3, "seen": [1, 2]})
    {'stage': 'sft', 'step': '3', 'seen': '[1,2]'}
    """
    if metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else wire_json.encode(value, omit_none=False).decode()
        for name, value in metadata.items()
    }
