"""Listings of the command line: pages until the limit, the end or the total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import pytest

from tinkex.cli.paging import fetch_items
from tinkex.types import Cursor


@dataclass
class Page:
    items: list[int]
    cursor: Cursor | None


class Listing:
    """A server with so many items, whose pages have at most ``max_items``."""

    def __init__(self, total: int, *, max_items: int = 1000, counts: bool = True) -> None:
        self.total, self.max_items, self.counts = total, max_items, counts
        self.asked: list[tuple[int, int]] = []

    def page(self, limit: int, offset: int) -> Page:
        self.asked.append((limit, offset))
        count = min(limit, self.max_items)
        cursor = Cursor(offset=offset, limit=limit, total_count=self.total) if self.counts else None
        return Page(list(range(self.total))[offset : offset + count], cursor)

    def fetch(self, limit: int, offset: int = 0) -> tuple[list[int], int | None]:
        return fetch_items(self.page, lambda page: page.items, limit=limit, offset=offset, page_size=10)


@pytest.mark.parametrize(
    ("limit", "offset", "expected"),
    [(0, 0, range(25)), (3, 0, range(3)), (15, 4, range(4, 19)), (0, 20, range(20, 25)), (5, 99, range(0))],
)
@pytest.mark.parametrize("server", [{}, {"counts": False}, {"max_items": 4}], ids=str)
def test_a_listing_ends_at_the_limit_or_at_the_end(
    limit: int, offset: int, expected: range, server: dict[str, Any]
) -> None:
    found, total = Listing(25, **server).fetch(limit, offset)
    assert found == list(expected)
    assert total == (None if server.get("counts") is False else 25)


def test_a_short_page_without_a_total_is_the_last_one() -> None:
    listing = Listing(25, counts=False)
    listing.fetch(0)
    assert listing.asked == [(10, 0), (10, 10), (10, 20)]


def test_more_items_than_requested_are_cut() -> None:
    found, _ = fetch_items(lambda limit, offset: list("abcdef"), list, limit=2, offset=0, page_size=10)
    assert found == ["a", "b"]


@pytest.mark.parametrize(("limit", "offset"), [(-1, 0), (0, -1)])
def test_negative_numbers_are_rejected(limit: int, offset: int) -> None:
    with pytest.raises(click.UsageError, match="at least 0"):
        Listing(1).fetch(limit, offset)
