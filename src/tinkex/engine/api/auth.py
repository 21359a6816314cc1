"""Authentication: the X-API-Key header holds an API key of this server, or a token it issued for one.

On the routes of other protocols, and for metrics, it may also be a bearer token in the Authorization header.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tinkex.engine.api.tokens import Signer
from tinkex.engine.engine import Engine
from tinkex.engine.store import LOCAL_USER, KeyRow
from tinkex.errors import NotAllowed, Unauthorized

OPEN_TO_ALL = frozenset({"healthz", "download", "upload_file"})
"""Endpoints without authentication; URLs of downloads and uploads are signed."""

API_CALLS = "call"
"""The use of tokens that replace an API key."""

_HOW = "the server prints its key when it starts, and stores it in the file api_key of its data directory."


@dataclass(frozen=True)
class Authenticated:
    """The user of a request, and the key it was sent with; None where none is needed."""

    user: str
    key: KeyRow | None = None


def authenticate(
    engine: Engine, endpoint: str, headers: Mapping[str, str], *, accepts_bearer: bool = False
) -> Authenticated:
    """Returns who sent a request; raises :class:`Unauthorized`, which says how to get a key."""
    if not engine.config.auth or endpoint in OPEN_TO_ALL:
        return Authenticated(LOCAL_USER)
    credential = headers.get("x-api-key")
    if not credential and accepts_bearer:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        credential = token.strip() if scheme.lower() == "bearer" else None
    if not credential:
        header = (
            "in the X-API-Key header, or as a bearer token" if accepts_bearer else "in the X-API-Key header"
        )
        raise Unauthorized(f"this request has no API key; send one {header} (TINKER_API_KEY): {_HOW}")
    key = find_key(engine, credential)
    if key is None:
        raise Unauthorized(
            f"the API key is not valid on this server; set TINKER_API_KEY to the right one: {_HOW}"
        )
    return Authenticated(key.user_id, key)


def authenticate_operator(engine: Engine, headers: Mapping[str, str]) -> None:
    """Accept only the server's own key, which metrics collectors may send as a bearer token."""
    if authenticate(engine, "metrics", headers, accepts_bearer=True).user != LOCAL_USER:
        raise NotAllowed(f"only the operator may do this, with the server's own key: {_HOW}")


def find_key(engine: Engine, credential: str) -> KeyRow | None:
    """Returns the active key that a credential is, or that a token was issued for; None if it is not valid."""
    users = engine.store.users
    if not credential.startswith("eyJ"):
        return users.find_key(credential)
    claims = signer_of(engine).read(API_CALLS, credential, time.time())
    return users.key(int(claims["key"])) if claims is not None else None


def signer_of(engine: Engine) -> Signer:
    """Returns the signer of this server's tokens."""
    return _signer(engine.store.signing_key)


@lru_cache(maxsize=16)
def _signer(secret: bytes) -> Signer:
    return Signer(secret)
