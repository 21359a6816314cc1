"""Long polls: a handler that waits is cancelled as soon as its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def cancel_on_disconnect(request: Request, handler: Awaitable[T]) -> T:
    """Returns the handler's result; raises :class:`ClientDisconnect` if the client disconnects first.

    The request's body must have been read.
    """
    task = asyncio.current_task()
    assert task is not None
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await handler
    except asyncio.CancelledError:
        if not disconnected or task.uncancel() > 0:
            raise  # cancelled from outside, for example by a server that shuts down
        raise ClientDisconnect from None
    finally:
        watcher.cancel()
