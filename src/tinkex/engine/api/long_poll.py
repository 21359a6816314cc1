"""Long polls: a handler that waits is cancelled soon after its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")

WATCH_AFTER_S = 0.25
"""Most polls end sooner than this, and are not worth a task that watches their connection."""


async def cancel_on_disconnect(request: Request, handler: Awaitable[T]) -> T:
    """Returns the handler's result; raises :class:`ClientDisconnect` if the client disconnects while it waits.

    The request's body must have been read.
    """
    task = asyncio.current_task()
    assert task is not None
    disconnected = False
    watcher: asyncio.Task[None] | None = None

    async def watch() -> None:
        nonlocal disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    def start() -> None:
        nonlocal watcher
        watcher = asyncio.create_task(watch())

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, start)
    try:
        return await handler
    except asyncio.CancelledError:
        if not disconnected or task.uncancel() > 0:
            raise  # cancelled from outside, for example by a server that shuts down
        raise ClientDisconnect from None
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
