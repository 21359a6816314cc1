"""Short-lived tokens: fetched for the long-lived credential, kept fresh, and sent instead of it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tinkex.errors import APIError, ConfigError, MissingApiKeyError

__all__ = ["Tokens", "credential_of", "expiry"]

FRESH_S = 300.0
"""A token with less left than this is renewed in the background."""
USABLE_S = 60.0
"""A token with less left than this is renewed before the next call."""
PAUSE_AFTER_FAILURE_S = 60.0
COMMAND_TIMEOUT_S = 60.0


class Tokens:
    """Hands out a token that is valid; ``fetch`` gets a new one for a credential."""

    def __init__(
        self,
        credential: Callable[[], Awaitable[str]],
        fetch: Callable[[str], Awaitable[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._credential = credential
        self._fetch = fetch
        self._clock = clock
        self._token: str | None = None
        self._valid_until = float("-inf")
        self._not_before = float("-inf")
        self._renewing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return "Tokens(…)"

    async def current(self) -> str:
        """A token; renews it first when it is about to expire.

        When renewing fails, the old token goes on being used, and the next try waits a minute.
        """
        left = self._valid_until - self._clock()
        if self._token is not None and left > FRESH_S:
            return self._token
        if self._clock() >= self._not_before and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew())
            self._renewing.add_done_callback(_read)
        renewing = self._renewing
        if renewing is not None and (self._token is None or left <= USABLE_S):
            try:
                await asyncio.shield(renewing)
            except (APIError, ConfigError):
                if self._token is None:
                    raise
        assert self._token is not None
        return self._token

    def refused(self, token: str) -> None:
        """Notes that the server does not take a token: the next one is asked for at once, unless it is there already."""
        if token == self._token:
            self._token = None
            self._valid_until = self._not_before = float("-inf")

    async def _renew(self) -> None:
        try:
            token = await self._fetch(await self._credential())
        except (APIError, ConfigError):
            if self._token is not None:
                self._not_before = self._clock() + PAUSE_AFTER_FAILURE_S
            raise
        self._token = token
        self._valid_until = self._clock() + (expiry(token) - time.time())


def _read(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # whoever needed the token has seen it


def expiry(token: str) -> float:
    """When a token expires, in seconds since 1970; 0 where it does not say so.

    >>> body = base64.urlsafe_b64encode(b'{"exp": 1700000000}').decode().rstrip("=")
    >>> expiry(f"eyJhbGciOiJub25lIn0.{body}."), expiry("no token")
    (1700000000.0, 0.0)
    """
    try:
        body = token.split(".")[1]
        claims: dict[str, Any] = msgspec.json.decode(
            base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=dict[str, Any]
        )
        return float(claims["exp"])
    except (IndexError, KeyError, ValueError, TypeError, binascii.Error, msgspec.DecodeError):
        return 0.0


async def credential_of(api_key: str | None, command: str | None, *, by_command: bool) -> str:
    """The long-lived credential: the key, or what the user's command prints.

    ``by_command`` is the server's wish that the command comes first; a key that is a token already stays.
    """
    prefers_command = command is not None and by_command and not (api_key or "").startswith("eyJ")
    if api_key is not None and not prefers_command:
        return api_key
    if command is None:
        raise MissingApiKeyError("no API key: pass api_key=…, or set TINKER_API_KEY or TINKER_CREDENTIAL_CMD")
    return await asyncio.to_thread(_printed, command)


def _printed(command: str) -> str:
    # Neither the command nor what it prints is quoted: both may hold the secret.
    try:
        done = subprocess.run(  # noqa: S602 - a shell line is what the variable holds
            command, shell=True, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the command in TINKER_CREDENTIAL_CMD did not end within {COMMAND_TIMEOUT_S:g} s; run it by hand"
        ) from None
    if done.returncode != 0 or not done.stdout.strip():
        raise ConfigError(
            f"the command in TINKER_CREDENTIAL_CMD printed no credential (status {done.returncode}); run it by hand"
        )
    return done.stdout.strip()
