"""Connections belong to a server and a key, not to a client."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

import pytest

from tests.scripted import ScriptedServer
from tests.unit.transport.loopback import Seen, loopback, says
from tinkex import (
    AdminClient,
    APIConnectionError,
    APIResponseValidationError,
    Config,
    RestClient,
    ServiceClient,
)
from tinkex._transport.base import Request
from tinkex._transport.shared import SharedHttp


def share(url: str, **settings: object) -> SharedHttp:
    return SharedHttp(Config(base_url=url, **{"api_key": "tml-x", **settings}))  # type: ignore[arg-type]


async def test_clients_of_one_server_and_key_use_the_same_connection() -> None:
    async with loopback(says()) as server:
        one, two = share(server.url), share(server.url + "/")
        for _ in range(3):
            await one.send(Request("GET", "/x"))
            await two.send(Request("GET", "/x"))
        assert len(server.seen) == 6
        assert server.connections == 1
        await one.close()
        await two.close()


async def test_closing_one_leaves_the_others_their_connections() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def held(seen: Seen, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await answer.wait()
        await says()(seen, writer)

    async with loopback(held) as server:
        one, two = share(server.url), share(server.url)
        waiting = asyncio.ensure_future(two.send(Request("GET", "/x")))
        await asked.wait()
        await one.close()
        with pytest.raises(APIConnectionError, match="closed"):
            await one.send(Request("GET", "/x"))
        answer.set()
        assert (await waiting).status == 200
        await two.close()
        # the next one dials again
        three = share(server.url)
        assert (await three.send(Request("GET", "/x"))).status == 200
        assert server.connections == 2
        await three.close()


@pytest.mark.slow
async def test_a_share_that_is_forgotten_keeps_nothing_open() -> None:
    async with loopback(says()) as server:
        one, two = share(server.url), share(server.url)
        await one.send(Request("GET", "/x"))
        connections = one.connections
        del one
        gc.collect()
        await two.close()
        with pytest.raises(APIConnectionError, match="closed"):
            await connections.send(Request("GET", "/x"))


def test_other_keys_servers_and_routes_have_connections_of_their_own() -> None:
    url = "http://host:1"
    mine = share(url)
    assert share("HTTP://HOST:1").connections is mine.connections
    for other in (
        share(url, api_key="tml-y"),
        share("http://host:2"),
        share("http://host:1/prefix"),
        share(url, proxy="http://proxy:3"),
        share(url, pool_size=2),
    ):
        assert other.connections is not mine.connections


async def test_every_kind_of_client_has_a_share() -> None:
    async with loopback(says(200, b"{}")) as server:
        settings: dict[str, Any] = {"base_url": server.url, "api_key": "tml-z"}
        service, rest, admin = ServiceClient(**settings), RestClient(**settings), AdminClient(**settings)
        for call in (
            service.get_server_capabilities_async,
            rest.get_health_async,
            admin.get_current_checkpoint_storage_usage_async,
        ):
            with suppress(APIResponseValidationError):
                await call()
        assert len(server.seen) == 3
        assert server.connections == 1
        await service.close("success")


def test_a_holder_and_settings_contradict_each_other() -> None:
    service = ServiceClient(transport=ScriptedServer().transport)
    assert RestClient(service.holder).get_sampler("s").result(10).base_model == "toy"
    with pytest.raises(ValueError, match="RestClient takes a holder"):
        RestClient(service.holder, base_url="http://host:2")
    with pytest.raises(ValueError, match="AdminClient takes a holder"):
        AdminClient(service.holder, api_key="tml-q")
