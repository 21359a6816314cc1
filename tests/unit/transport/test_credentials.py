"""Short-lived tokens."""

from __future__ import annotations

import asyncio
import base64
import json
import time

import pytest

from tinkex._transport.caller import Caller
from tinkex._transport.credentials import REFRESH_RETRY_S, TokenProvider, credential_of
from tinkex._wire.endpoints import endpoint
from tinkex.config import Config
from tinkex.errors import APIConnectionError, AuthenticationError, ConfigError
from tinkex.testing import MockTransport, Reply, Request, reply


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
    tokens = TokenProvider(key, office.fetch)
    first = await asyncio.gather(*(tokens.current() for _ in range(10)))
    assert len(set(first)) == 1
    assert office.asked == ["tml-key"]


async def test_a_token_is_renewed_in_the_background_and_then_in_time() -> None:
    office, clock = Office(), Clock()
    tokens = TokenProvider(key, office.fetch, clock=clock)
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
    tokens = TokenProvider(key, office.fetch, clock=clock)
    first = await tokens.current()
    office.failing = True
    clock.now += 3590
    assert [await tokens.current() for _ in range(5)] == [first] * 5
    assert len(office.asked) == 2
    office.failing = False
    clock.now += REFRESH_RETRY_S
    assert await tokens.current() != first


class Strict:
    """A server that takes the newest of its tokens only; it may have forgotten the others."""

    def __init__(self) -> None:
        self.valid = ""
        self.seen: list[tuple[str, int]] = []

    async def hand_out(self, credential: str) -> str:
        self.valid = token(f"t{len(self.seen)}", 3600)
        return self.valid

    def __call__(self, request: Request) -> Reply:
        known = request.headers["x-api-key"] == self.valid
        self.seen.append((request.path, 200 if known else 401))
        return reply({"status": "ok"}) if known else reply({"detail": "who are you?"}, status=401)


async def test_a_rejected_token_is_replaced_and_the_call_repeated() -> None:
    server = Strict()
    caller = Caller(MockTransport(server), Config(base_url="http://mock", api_key="tml-key", max_retries=0))
    caller.tokens = TokenProvider(key, server.hand_out)
    row = endpoint("healthz")
    assert (await caller.call(row)).status == "ok"
    server.valid = "of another server, with other secrets"
    answers = await asyncio.gather(*(caller.call(row) for _ in range(5)))
    assert [answer.status for answer in answers] == ["ok"] * 5
    assert 1 <= [status for _, status in server.seen].count(401) <= 5, "each was rejected once at most"


async def test_the_error_of_a_rejected_credential_is_raised() -> None:
    server = Strict()
    caller = Caller(MockTransport(server), Config(base_url="http://mock", api_key="tml-key", max_retries=0))
    office = Office()
    office.failing = True
    fetch = iter([server.hand_out, office.fetch])

    async def exchange(credential: str) -> str:
        return await next(fetch)(credential)

    caller.tokens = TokenProvider(key, exchange)
    row = endpoint("healthz")
    await caller.call(row)
    server.valid = "another"
    with pytest.raises(AuthenticationError, match="who are you"):
        await caller.call(row)
    assert len(office.asked) == 1


async def test_a_failure_without_any_token_is_the_callers() -> None:
    office = Office()
    office.failing = True
    tokens = TokenProvider(key, office.fetch)
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
