"""Who is calling: the X-API-Key header, which holds a key of this server or a token it gave for one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache

from tinkex.engine.api.tokens import Signer
from tinkex.engine.engine import Engine
from tinkex.engine.store import LOCAL_USER, KeyRow
from tinkex.errors import NotAllowed, Unauthorized

OPEN_TO_ALL = frozenset({"healthz", "download"})
"""Endpoints that answer without a key; addresses of downloads are signed."""

CALLS = "call"
"""What tokens that stand for a key are good for."""

_HOW = "the server prints its key when it starts, and keeps it in the file api_key of its data directory."


def authenticate(engine: Engine, endpoint: str, headers: Mapping[str, str]) -> str:
    """The user a call acts for; raises :class:`Unauthorized` that says how to get a key."""
    if not engine.config.auth or endpoint in OPEN_TO_ALL:
        return LOCAL_USER
    credential = headers.get("x-api-key")
    if not credential:
        raise Unauthorized(
            f"this call came without a key; send one in the X-API-Key header (TINKER_API_KEY): {_HOW}"
        )
    key = key_of(engine, credential)
    if key is None:
        raise Unauthorized(
            f"this server does not know that API key; set TINKER_API_KEY to the right one: {_HOW}"
        )
    return key.user_id


def authenticate_operator(engine: Engine, headers: Mapping[str, str]) -> None:
    """Let only the operator pass, who holds the server's own key; collectors may send it as a bearer token."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = {"x-api-key": token.strip()} if scheme.lower() == "bearer" else headers
    if authenticate(engine, "metrics", given) != LOCAL_USER:
        raise NotAllowed(f"this is for the operator of the server, with the server's own key: {_HOW}")


def key_of(engine: Engine, credential: str) -> KeyRow | None:
    """The key a credential is, or a token stands for, as long as the key is in force."""
    users = engine.store.users
    if not credential.startswith("eyJ"):
        return users.find_key(credential)
    claims = signer_of(engine).read(CALLS, credential, time.time())
    return users.key(int(claims["key"])) if claims is not None else None


def signer_of(engine: Engine) -> Signer:
    """Signs what this server hands out."""
    return _signer(engine.store.signing_key)


@lru_cache(maxsize=16)
def _signer(secret: bytes) -> Signer:
    return Signer(secret)
