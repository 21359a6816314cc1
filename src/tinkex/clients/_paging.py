"""Iterators over pages of a listing, for plain and for asynchronous code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from tinkex._runtime import await_future

__all__ = ["PageIterator", "by_offset"]

P = TypeVar("P")
T = TypeVar("T")


class PageIterator(Iterator[T], AsyncIterator[T], Generic[P, T]):
    """The items of all pages; a page is requested when its first item is needed. Works with ``for`` and ``async for``.

    ``request`` returns the future of the page after the given one (of the first page for None), or None at the end;
    ``items`` returns the items of a page.
    """

    def __init__(
        self, request: Callable[[P | None], Future[P] | None], items: Callable[[P], Sequence[T]]
    ) -> None:
        self._request = request
        self._items = items
        self._page: P | None = None
        self._ready: Iterator[T] = iter(())
        self._finished = False

    def __next__(self) -> T:
        while True:
            for item in self._ready:
                return item
            future = self._next_page()
            if future is None:
                raise StopIteration
            self._take(future.result())

    async def __anext__(self) -> T:
        while True:
            for item in self._ready:
                return item
            future = self._next_page()
            if future is None:
                raise StopAsyncIteration
            self._take(await await_future(future, propagate_cancel=True))

    def _next_page(self) -> Future[P] | None:
        future = None if self._finished else self._request(self._page)
        self._finished = future is None
        return future

    def _take(self, page: P) -> None:
        self._page = page
        self._ready = iter(self._items(page))


def by_offset(list_page: Callable[[int], Future[P]], items: Callable[[P], Sequence[T]]) -> PageIterator[P, T]:
    """Pages that are requested by the number of items before them; an empty page is the end."""
    offset = 0

    def request(previous: P | None) -> Future[P] | None:
        nonlocal offset
        if previous is not None:
            count = len(items(previous))
            if count == 0:
                return None
            offset += count
        return list_page(offset)

    return PageIterator(request, items)
