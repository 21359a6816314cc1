"""Callers that wait for a result, or for anything of a sampler to end, woken through their own event loop the moment it is there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from tinkex.engine.store import Outcome

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[Outcome | None]]


class Waiters:
    """Who waits for which request. Any event loop may wait, any thread may wake; nobody polls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[_Waiter]] = {}
        self._closed = False

    def enter(self, request_id: str) -> asyncio.Future[Outcome | None]:
        """Start to wait, on the running loop; the future gives the outcome, or None when waiting was ended early."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome | None] = loop.create_future()
        with self._lock:
            if self._closed:
                future.set_result(None)
            else:
                self._waiting.setdefault(request_id, []).append((loop, future))
        return future

    def leave(self, request_id: str, future: asyncio.Future[Outcome | None]) -> None:
        """Stop waiting."""
        with self._lock:
            rest = [waiter for waiter in self._waiting.pop(request_id, []) if waiter[1] is not future]
            if rest:
                self._waiting[request_id] = rest

    def __len__(self) -> int:
        with self._lock:
            return sum(len(line) for line in self._waiting.values())

    def wake(self, outcomes: Iterable[tuple[str, Outcome]]) -> None:
        """Hand outcomes to those who wait for them."""
        for request_id, outcome in outcomes:
            with self._lock:
                waiters = self._waiting.pop(request_id, [])
            for waiter in waiters:
                _deliver(waiter, outcome)

    def nudge(self, names: Iterable[str]) -> None:
        """Let those go who wait for something to happen under a name; they look for themselves what it was."""
        for name in names:
            with self._lock:
                waiters = self._waiting.pop(name, [])
            for waiter in waiters:
                _deliver(waiter, None)

    def end_all(self) -> None:
        """Let everybody go without an outcome, now and from now on; used when the engine stops."""
        with self._lock:
            self._closed = True
            waiters = [waiter for line in self._waiting.values() for waiter in line]
            self._waiting.clear()
        for waiter in waiters:
            _deliver(waiter, None)


def _deliver(waiter: _Waiter, outcome: Outcome | None) -> None:
    loop, future = waiter

    def settle() -> None:
        if not future.done():
            future.set_result(outcome)

    # A loop that was closed meanwhile has nobody left to tell.
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
