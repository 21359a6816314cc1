"""Who is calling: the X-API-Key header against the stored hashes."""

from __future__ import annotations

from collections.abc import Mapping

from tinkex.engine.core import Engine
from tinkex.engine.store import LOCAL_USER
from tinkex.errors import Unauthorized

OPEN_TO_ALL = frozenset({"healthz"})
"""Endpoints that answer without a key."""

_HOW = "the server prints its key when it starts, and keeps it in the file api_key of its data directory."


def authenticate(engine: Engine, endpoint: str, headers: Mapping[str, str]) -> str:
    """The user a call acts for; raises :class:`Unauthorized` that says how to get a key."""
    if not engine.config.auth or endpoint in OPEN_TO_ALL:
        return LOCAL_USER
    key = headers.get("x-api-key")
    if not key:
        raise Unauthorized(
            f"this call came without a key; send one in the X-API-Key header (TINKER_API_KEY): {_HOW}"
        )
    owner = engine.store.users.find(key)
    if owner is None:
        raise Unauthorized(
            f"this server does not know that API key; set TINKER_API_KEY to the right one: {_HOW}"
        )
    return owner
