"""Closes the sessions that tests leave open, so that no heartbeat outlives its server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from typing import Any


def close_sessions(base_url: str | None = None) -> None:
    """Closes the open sessions of this process: those at ``base_url``, or all, the official client's among them.

    Clients that nothing refers to any more count: their heartbeats keep the session alive.
    """
    sessions = _instances("tinkex.clients.session", "Session")
    chosen = [each for each in sessions if base_url in {None, each.caller.config.base_url}]
    if chosen:
        from tinkex._runtime import background
        from tinkex.errors import ClosedError

        async def close(session: Any) -> None:
            with contextlib.suppress(ClosedError):  # another session on the same connections has closed them
                await session.close("success")

        async def close_all() -> None:
            await asyncio.gather(*map(close, chosen))

        background().run(close_all())
    if base_url is None:
        for holder in _instances("tinker.lib.internal_client_holder", "InternalClientHolder"):
            if _has_session(holder):
                holder.close()


def _has_session(holder: Any) -> bool:
    """Whether it sends heartbeats; those without a session are shared by all REST clients, and stay open."""
    try:
        holder.get_session_id()
    except AssertionError:
        return False
    return True


def _instances(module: str, name: str) -> list[Any]:
    """Every object of a class, if its module is loaded."""
    if module not in sys.modules:
        return []
    cls = getattr(sys.modules[module], name)
    return [each for each in gc.get_objects() if type(each) is cls]
