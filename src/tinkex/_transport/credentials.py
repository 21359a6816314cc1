"""Credentials: short-lived tokens, exchanged for the long-lived credential and refreshed, or the output of a command."""

from __future__ import annotations

import asyncio
import base64
import binascii
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tinkex._runtime import create_detached_task
from tinkex.errors import APIError, ConfigError, MissingApiKeyError

__all__ = ["CommandCredential", "TokenProvider", "credential_of", "expiry"]

REFRESH_AHEAD_S = 300.0
"""A token that expires sooner is refreshed in the background."""
MIN_VALIDITY_S = 60.0
"""A token that expires sooner is refreshed before the next call."""
REFRESH_RETRY_S = 60.0
COMMAND_TIMEOUT_S = 60.0


class TokenProvider:
    """Returns a valid token; ``fetch`` exchanges a credential for a new one."""

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
        self._refresh_not_before = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return "TokenProvider(…)"

    async def current(self) -> str:
        """Returns a token; refreshes it first if it is about to expire.

        If the refresh fails, the old token stays in use, and the next attempt waits a minute.
        """
        remaining_s = self._valid_until - self._clock()
        if self._token is not None and remaining_s > REFRESH_AHEAD_S:
            return self._token
        if self._clock() >= self._refresh_not_before and (
            self._refreshing is None or self._refreshing.done()
        ):
            self._refreshing = asyncio.create_task(self._refresh())
            self._refreshing.add_done_callback(_retrieve_exception)
        refreshing = self._refreshing
        if refreshing is not None and (self._token is None or remaining_s <= MIN_VALIDITY_S):
            try:
                await asyncio.shield(refreshing)
            except (APIError, ConfigError):
                if self._token is None:
                    raise
        assert self._token is not None
        return self._token

    def invalidate(self, token: str) -> None:
        """Drops a token that the server rejected, unless it was replaced already; the next call fetches a new one."""
        if token == self._token:
            self._token = None
            self._valid_until = self._refresh_not_before = float("-inf")

    async def _refresh(self) -> None:
        try:
            token = await self._fetch(await self._credential())
        except (APIError, ConfigError):
            if self._token is not None:
                self._refresh_not_before = self._clock() + REFRESH_RETRY_S
            raise
        self._token = token
        self._valid_until = self._clock() + (expiry(token) - time.time())


class CommandCredential:
    """The credential that the user's command prints, for servers without short-lived tokens and for the first call to any."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._printing: asyncio.Task[str] | None = None

    def __repr__(self) -> str:
        return "CommandCredential(…)"

    async def current(self) -> str:
        """Returns the credential; the command runs at the first call, and again after it failed or was rejected."""
        printing = self._printing
        if printing is None or (printing.done() and (printing.cancelled() or printing.exception())):
            self._printing = printing = create_detached_task(asyncio.to_thread(_printed, self._command))
            printing.add_done_callback(_retrieve_exception)
        return await asyncio.shield(printing)

    def invalidate(self, credential: str) -> None:
        """Drops a credential that the server rejected, unless it was replaced already."""
        printing = self._printing
        if (
            printing is not None
            and printing.done()
            and not printing.cancelled()
            and printing.exception() is None
            and printing.result() == credential
        ):
            self._printing = None


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # so that asyncio does not warn: the call that needed the token raised it


def expiry(token: str) -> float:
    """When a token expires, in seconds since 1970; 0 if it has no readable expiry.

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
    """The long-lived credential: the key, or the output of the user's command.

    ``by_command``: the server prefers the command. A key that is a token already stays in use.
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
            f"the command in TINKER_CREDENTIAL_CMD did not exit within {COMMAND_TIMEOUT_S:g} s; run it by hand"
        ) from None
    if done.returncode != 0 or not done.stdout.strip():
        raise ConfigError(
            f"the command in TINKER_CREDENTIAL_CMD printed no credential (status {done.returncode}); run it by hand"
        )
    return done.stdout.strip()
