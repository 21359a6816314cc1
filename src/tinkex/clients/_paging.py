"""Iterators over pages of a listing, for plain and for asynchronous code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from tinkex._runtime import await_future
from tinkex.errors import APIResponseValidationError
from tinkex.types.base import Options

__all__ = ["PageIterator", "by_cursor", "by_offset"]

MAX_REPEATS = 2

P = TypeVar("P")
T = TypeVar("T")
Q = TypeVar("Q", bound=Options)


class PageWithCursor(Protocol):
    """A page of a search."""

    @property
    def next_cursor(self) -> Any:
        """What to request the next page with; None at the end."""
        ...


C = TypeVar("C", bound=PageWithCursor)


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
    """Pages that are requested by the number of items before them; an empty page is the end.

    A server that ignores the offset, and returns the same page again and again, is an ``APIResponseValidationError``.
    """
    offset, repeats = 0, 0
    last: Sequence[T] = ()

    def request(previous: P | None) -> Future[P] | None:
        return None if previous is not None and not last else list_page(offset)

    def take(page: P) -> Sequence[T]:
        nonlocal offset, repeats, last
        found = items(page)
        offset += len(found)
        repeated = bool(found) and found == last
        last = found
        if not repeated:
            repeats = 0
            return found
        repeats += 1  # once may be due to items that were added meanwhile, which move the others
        if repeats == MAX_REPEATS:
            raise APIResponseValidationError(
                None,
                None,
                "the server returns the same page of a listing again and again, whatever the offset",
            )
        return ()

    return PageIterator(request, take)


def by_cursor(
    query: Q, search: Callable[[Q], Future[C]], items: Callable[[C], Sequence[T]]
) -> PageIterator[C, T]:
    """Pages that are requested with the cursor of the page before them."""

    def request(previous: C | None) -> Future[C] | None:
        if previous is None:
            return search(query)
        if previous.next_cursor is None:
            return None
        return search(query.model_copy(update={"cursor": previous.next_cursor}))

    return PageIterator(request, items)
