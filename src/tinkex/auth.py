"""Whether this machine has a key, and whether a server accepts it."""

from __future__ import annotations

import os

from tinkex.config import Config
from tinkex.errors import ConfigError, TinkexError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The configured API key, from ``TINKER_API_KEY`` or the credentials file; None if there is none.

    Looks on this machine only, and runs no command.

    ::

        if tinkex.auth.get_tinker_token() is None:
            raise SystemExit("set TINKER_API_KEY first")
    """
    environ = {name: value for name, value in os.environ.items() if name != "TINKER_CREDENTIAL_CMD"}
    try:
        # Whichever server is configured: the engine in this process would need no key at all.
        return Config.resolve(environ={**environ, "TINKER_BASE_URL": ""}, needs_key=False).api_key
    except ConfigError:
        return None


def tinker_has_credentials() -> bool:
    """Whether a credential is configured: a key, or a command that prints one (it is not run)."""
    return get_tinker_token() is not None or bool(os.environ.get("TINKER_CREDENTIAL_CMD", "").strip())


def raise_if_tinker_not_accessible() -> None:
    """Asks the configured server what it offers, once; raises a ``TinkexError`` that says what is wrong.

    ``AuthenticationError`` means the key was refused, ``BillingError`` that the account is not set up,
    ``APIConnectionError`` that nobody answered, ``ConfigError`` that there is no key.
    """
    from tinkex._runtime import background
    from tinkex._transport.retry import RetryPolicy
    from tinkex.clients._connection import connect
    from tinkex.clients._rest_calls import RestCalls

    async def ask() -> None:
        try:
            await RestCalls(caller).capabilities()
        finally:
            await caller.close()

    try:
        caller = connect(config=None, transport=None, events=None)
        caller.policy = RetryPolicy(max_retries=0)
        background().run(ask())
    except TinkexError:
        raise
    except (OSError, ValueError) as error:
        raise TinkexError(str(error)) from error
