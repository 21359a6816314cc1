"""The client's own API key: exchanging it for a token, showing and revoking it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from tinkex.engine.api.auth import API_CALLS, signer_of
from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.errors import json_response
from tinkex.engine.store import KeyRow
from tinkex.errors import InvalidInput
from tinkex.types import AuthTokenResponse

TOKEN_TTL_S = 3600
ORGANIZATION = "tinkex"


async def auth_token(call: Call) -> Reply:
    """Returns a token to send instead of the key; it is valid for an hour, or until its key is revoked."""
    key = _own_key(call)
    now = time.time()
    claims = {
        "sub": f"tml:user:{key.user_id}",
        "org_id": ORGANIZATION,
        "email": _email(key),
        "iat": int(now),
        "key": key.key_id,
    }
    return AuthTokenResponse(jwt=signer_of(call.engine).issue(API_CALLS, claims, now + TOKEN_TTL_S))


async def get_own_key(call: Call) -> Reply:
    """Returns the key in use."""
    key = _own_key(call)
    return json_response(
        {
            "key_id": key.key_id,
            "name": key.name,
            "note": "",
            "details": {"org_details": {"name": ORGANIZATION}, "user_details": {"email": _email(key)}},
        }
    )


async def delete_own_key(call: Call) -> Reply:
    """Revoke the key in use, and with it every token issued for it."""
    key = _own_key(call)
    await asyncio.to_thread(call.engine.store.users.revoke, key.key_id, time.time())
    return None


def _own_key(call: Call) -> KeyRow:
    if not call.engine.config.auth:
        raise InvalidInput("this server was started with --no-auth, so it has no keys.")
    assert call.key is not None, "the request was authenticated with it"
    return call.key


def _email(key: KeyRow) -> str:
    return key.user_id if "@" in key.user_id else ""


HANDLERS: Mapping[str, Handler] = {
    "auth_token": auth_token,
    "get_own_key": get_own_key,
    "delete_own_key": delete_own_key,
}
