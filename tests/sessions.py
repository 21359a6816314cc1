"""Closes the sessions that tests leave open, so that no heartbeat outlives its server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from typing import Any


def close_sessions(base_url: str | None = None) -> None:
    """Closes the open sessions of our client in this process: those at ``base_url``, or all.

    Clients that nothing refers to any more count: their heartbeats keep the session alive.
    """
    if not any(thread.name == "tinkex" for thread in threading.enumerate()):
        return  # without the client's event loop there is no session
    from tinkex._runtime import background
    from tinkex.errors import ClosedError

    if not asyncio.all_tasks(background().loop):
        return  # without a task there is no heartbeat, and finding sessions takes a while
    sessions = _instances("tinkex.clients.session", "Session")
    chosen = [each for each in sessions if base_url in {None, each.caller.config.base_url}]

    async def close(session: Any) -> None:
        with contextlib.suppress(ClosedError):  # another session on the same connections has closed them
            await session.finish("success")

    async def close_all() -> None:
        await asyncio.gather(*map(close, chosen))

    background().run(close_all())


def close_official_sessions() -> None:
    """Ends the heartbeats of the official client's sessions in this process."""
    for holder in _instances("tinker.lib.internal_client_holder", "InternalClientHolder"):
        # Without a session, which all REST clients share, or not constructed completely.
        with contextlib.suppress(AssertionError, AttributeError):
            holder.get_session_id()
            holder.run_coroutine_threadsafe(holder.aclose()).result(timeout=30)


def _instances(module: str, name: str) -> list[Any]:
    """Every object of a class, if its module is loaded."""
    if module not in sys.modules:
        return []
    cls = getattr(sys.modules[module], name)
    return [each for each in gc.get_objects() if type(each) is cls]
