"""The items of listings, page by page, for ``--limit`` and ``--offset``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import click

__all__ = ["check_range", "fetch_items"]

P = TypeVar("P")
T = TypeVar("T")


def check_range(limit: int, offset: int) -> None:
    """Rejects negative numbers."""
    if limit < 0 or offset < 0:
        raise click.UsageError("--limit and --offset must be at least 0")


def fetch_items(
    list_page: Callable[[int, int], P],
    items: Callable[[P], Sequence[T]],
    *,
    limit: int,
    offset: int,
    page_size: int,
) -> tuple[list[T], int | None]:
    """Returns ``limit`` items (0: all) from ``offset`` on, and the total that the server states.

    A page with fewer items than requested is the last one, unless the total says that there are more: a server may have smaller pages.

    >>> fetch_items(lambda limit, offset: "abcdef"[offset : offset + limit], list, limit=3, offset=1, page_size=2)
    (['b', 'c', 'd'], None)
    """
    check_range(limit, offset)
    found: list[T] = []
    total: int | None = None
    while limit == 0 or len(found) < limit:
        wanted = page_size if limit == 0 else min(page_size, limit - len(found))
        page = list_page(wanted, offset + len(found))
        received = items(page)[:wanted]
        found += received
        cursor = getattr(page, "cursor", None)
        total = None if cursor is None else cursor.total_count
        more = total is not None and offset + len(found) < total
        if not received or (len(received) < wanted and not more):
            break
    return found, total
