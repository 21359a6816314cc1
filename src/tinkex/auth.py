"""Checks whether this machine has an API key, and whether the server accepts it."""

from __future__ import annotations

import os

from tinkex.config import Config
from tinkex.errors import ConfigError, TinkexError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """Returns the API key from ``TINKER_API_KEY`` or the credentials file; None if there is none.

    Makes no network request and runs no credential command.

    ::

        if tinkex.auth.get_tinker_token() is None:
            raise SystemExit("set TINKER_API_KEY first")
    """
    environ = {name: value for name, value in os.environ.items() if name != "TINKER_CREDENTIAL_CMD"}
    try:
        # The configured server is ignored: with the embedded engine, no key would be looked up.
        return Config.resolve(environ={**environ, "TINKER_BASE_URL": ""}, needs_key=False).api_key
    except ConfigError:
        return None


def tinker_has_credentials() -> bool:
    """Returns whether a credential is configured: a key, or a command that prints one (it is not run)."""
    return get_tinker_token() is not None or bool(os.environ.get("TINKER_CREDENTIAL_CMD", "").strip())


def raise_if_tinker_not_accessible() -> None:
    """Requests the configured server's capabilities, once; raises a ``TinkexError`` if that fails.

    ``AuthenticationError`` means the key was rejected, ``BillingError`` that the account is not set up,
    ``APIConnectionError`` that the server is unreachable, ``ConfigError`` that there is no key.
    """
    from tinkex._runtime import background
    from tinkex._transport.retry import RetryPolicy
    from tinkex.clients._connection import connect
    from tinkex.clients._rest_calls import RestCalls

    async def request_capabilities() -> None:
        try:
            await RestCalls(caller).capabilities()
        finally:
            await caller.close()

    try:
        caller = connect(config=None, transport=None, events=None)
        caller.policy = RetryPolicy(max_retries=0)
        background().run(request_capabilities())
    except TinkexError:
        raise
    except (OSError, ValueError) as error:
        raise TinkexError(str(error)) from error
