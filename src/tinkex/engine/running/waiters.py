"""Callers that wait for a result, or for any sample of a sampler, notified through their own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import TypeAlias

from tinkex.engine.operation import Kind, Operation
from tinkex.engine.store import Outcome

_Waiter: TypeAlias = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Outcome | None]"]


class Waiters:
    """Who waits for which request. Any event loop may wait, and any thread may notify."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[_Waiter]] = {}
        self._closed = False

    def enter(self, name: str) -> asyncio.Future[Outcome | None]:
        """Start to wait for a request or a sampler, on the running loop; the future gives the outcome.

        It gives None if waiting was ended early, and for a sampler, whose results are in the store.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome | None] = loop.create_future()
        with self._lock:
            if self._closed:
                future.set_result(None)
            else:
                self._waiting.setdefault(name, []).append((loop, future))
        return future

    def leave(self, name: str, future: asyncio.Future[Outcome | None]) -> None:
        """Stop waiting."""
        with self._lock:
            rest = [waiter for waiter in self._waiting.pop(name, []) if waiter[1] is not future]
            if rest:
                self._waiting[name] = rest

    def __len__(self) -> int:
        with self._lock:
            return sum(len(line) for line in self._waiting.values())

    def notify(self, operations: Sequence[Operation]) -> None:
        """Give outcomes to those who wait for them, and wake those who wait for the samplers."""
        with self._lock:
            woken = [
                (waiter, operation.outcome)
                for operation in operations
                for waiter in self._waiting.pop(operation.request_id, ())
            ]
            samplers = {operation.run_id for operation in operations if operation.kind is Kind.SAMPLE}
            woken += [(waiter, None) for name in samplers for waiter in self._waiting.pop(name, ())]
        for waiter, outcome in woken:
            _deliver(waiter, outcome)

    def end_all(self) -> None:
        """Let everybody go without an outcome, now and from now on."""
        with self._lock:
            self._closed = True
            waiters = [waiter for line in self._waiting.values() for waiter in line]
            self._waiting.clear()
        for waiter in waiters:
            _deliver(waiter, None)


def _deliver(waiter: _Waiter, outcome: Outcome | None) -> None:
    loop, future = waiter
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(set_outcome, future, outcome)


def set_outcome(future: asyncio.Future[Outcome | None], outcome: Outcome | None) -> None:
    """Give a waiter its outcome, or None if there is none in time; called on its loop."""
    if not future.done():
        future.set_result(outcome)
