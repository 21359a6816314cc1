"""URLs that this server signs: anyone can use them without a key until they expire or the key that requested them is revoked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from tinkex.engine.api.auth import signer_of
from tinkex.engine.api.call import Call
from tinkex.engine.engine import Engine
from tinkex.errors import Expired


def sign_url(
    call: Call, purpose: str, claims: Mapping[str, Any], name: str, expires: float, origin: str
) -> str:
    """Returns the URL of a file for one purpose, which is also the part of the path before the token."""
    token = signer_of(call.engine).issue(purpose, {**claims, **_key_claim(call)}, expires)
    return f"{origin}/api/v1/{purpose}s/{token}/{quote(name)}"


def read_claims(engine: Engine, purpose: str, token: str) -> Mapping[str, Any]:
    """Returns the claims of a URL's token; raises ``Expired`` if it is not valid for this purpose, or no longer."""
    claims = signer_of(engine).read(purpose, token, time.time())
    if claims is None:
        raise Expired("this URL was not signed by this server, or has expired; request a new one.")
    if engine.config.auth and ("key" not in claims or engine.store.users.key(claims["key"]) is None):
        raise Expired("the API key that this URL was requested with has been revoked; request a new URL.")
    return claims


def _key_claim(call: Call) -> dict[str, int]:
    """The key that a URL is requested with; the URL is valid as long as the key is."""
    return {} if call.key is None else {"key": call.key.key_id}
