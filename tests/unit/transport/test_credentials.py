"""Short-lived tokens."""

from __future__ import annotations

import asyncio
import base64
import json
import time

import pytest

from tinkex._transport.credentials import PAUSE_AFTER_FAILURE_S, Tokens, credential_of
from tinkex.errors import APIConnectionError, ConfigError


def token(name: str, life_s: float) -> str:
    body = base64.urlsafe_b64encode(json.dumps({"sub": name, "exp": time.time() + life_s}).encode()).decode()
    return f"eyJhbGciOiJub25lIn0.{body.rstrip('=')}.x"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Office:
    """Hands out tokens that live an hour, or what the test puts first."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.failing = False

    async def fetch(self, credential: str) -> str:
        self.asked.append(credential)
        await asyncio.sleep(0)
        if self.failing:
            raise APIConnectionError(message="the office is closed")
        return token(f"t{len(self.asked)}", 3600)


async def key() -> str:
    return "tml-key"


async def test_a_token_is_fetched_once_and_kept() -> None:
    office = Office()
    tokens = Tokens(key, office.fetch)
    first = await asyncio.gather(*(tokens.current() for _ in range(10)))
    assert len(set(first)) == 1
    assert office.asked == ["tml-key"]


async def test_a_token_is_renewed_in_the_background_and_then_in_time() -> None:
    office, clock = Office(), Clock()
    tokens = Tokens(key, office.fetch, clock=clock)
    first = await tokens.current()
    clock.now += 3600 - 200
    assert await tokens.current() == first  # still good: the new one is on its way
    await asyncio.sleep(0.01)
    assert await tokens.current() != first
    clock.now += 3600
    assert await tokens.current() != first
    assert len(office.asked) == 3


async def test_a_failure_with_an_old_token_keeps_it_and_pauses() -> None:
    office, clock = Office(), Clock()
    tokens = Tokens(key, office.fetch, clock=clock)
    first = await tokens.current()
    office.failing = True
    clock.now += 3590
    assert [await tokens.current() for _ in range(5)] == [first] * 5
    assert len(office.asked) == 2
    office.failing = False
    clock.now += PAUSE_AFTER_FAILURE_S
    assert await tokens.current() != first


async def test_a_failure_without_any_token_is_the_callers() -> None:
    office = Office()
    office.failing = True
    tokens = Tokens(key, office.fetch)
    with pytest.raises(APIConnectionError, match="closed"):
        await tokens.current()


async def test_the_credential_is_the_key_or_what_the_command_prints() -> None:
    assert await credential_of("tml-a", None, by_command=True) == "tml-a"
    assert await credential_of("tml-a", "echo tml-b", by_command=False) == "tml-a"
    assert await credential_of("tml-a", "echo tml-b", by_command=True) == "tml-b"
    assert await credential_of("eyJa", "echo tml-b", by_command=True) == "eyJa"
    assert await credential_of(None, "echo ' tml-b '", by_command=False) == "tml-b"


@pytest.mark.parametrize("command", ["echo canary >&2; exit 3", "echo", "exit 1"])
async def test_a_command_without_a_credential_is_named_but_not_quoted(command: str) -> None:
    with pytest.raises(ConfigError, match="TINKER_CREDENTIAL_CMD") as caught:
        await credential_of(None, command, by_command=False)
    assert "canary" not in str(caught.value)
