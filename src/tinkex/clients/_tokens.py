"""Short-lived tokens for a caller, if the server issues them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._transport.credentials import TokenProvider, credential_of
from tinkex._wire.endpoints import endpoint

if TYPE_CHECKING:
    from tinkex import types
    from tinkex._transport.caller import Caller

__all__ = ["use_tokens"]


def use_tokens(caller: Caller, client_config: types.ClientConfigResponse) -> None:
    """Makes a caller send tokens instead of its key, if the server's configuration requires it."""
    config = caller.config
    if not client_config.pjwt_auth_enabled:
        return
    by_command = client_config.credential_default_source == "credential_cmd"

    async def fetch(credential: str) -> str:
        response: types.AuthTokenResponse = await caller.call(
            endpoint("auth_token"), b"{}", headers={"x-api-key": credential}
        )
        return response.jwt

    caller.tokens = TokenProvider(
        lambda: credential_of(config.api_key, config.credential_cmd, by_command=by_command), fetch
    )
