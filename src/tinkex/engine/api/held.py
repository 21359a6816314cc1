"""Calls that are held until something happens: one whose caller hangs up is let go at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def while_connected(request: Request, waiting: Awaitable[T]) -> T:
    """What is waited for, or :class:`ClientDisconnect` as soon as the caller is gone; the body must have been read."""
    holder = asyncio.current_task()
    assert holder is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        holder.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await waiting
    except asyncio.CancelledError:
        if not left or holder.uncancel() > 0:
            raise  # somebody else ends this call, such as a server that stops
        raise ClientDisconnect from None
    finally:
        watching.cancel()
