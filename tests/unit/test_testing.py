"""What we give users for their own tests."""

from __future__ import annotations

import asyncio

import pytest

import tinkex
from tinkex.testing import MockTransport, Reply, Request, reply


def test_a_plain_function_can_be_a_server() -> None:
    transport = MockTransport(lambda _: reply({"supported_models": []}))
    service = tinkex.ServiceClient(transport=transport)
    assert service.get_server_capabilities().supported_models == []
    assert transport.paths == ["get_server_capabilities"]


def test_so_can_an_async_one() -> None:
    async def server(request: Request) -> Reply:
        await asyncio.sleep(0)
        return reply({"supported_models": [{"model_name": request.path}]})

    service = tinkex.ServiceClient(transport=MockTransport(server))
    assert service.get_server_capabilities().supported_models[0].model_name is not None


def test_errors_of_the_function_reach_the_client() -> None:
    def server(_: Request) -> Reply:
        raise LookupError("oops")

    with pytest.raises(LookupError, match="oops"):
        tinkex.ServiceClient(transport=MockTransport(server)).get_server_capabilities()


def test_replies_are_json_or_protobuf() -> None:
    assert reply({"a": None}).body == b'{"a":null}'
    assert reply({"a": 1}).headers["content-type"] == "application/json"
    assert reply(b"\x01").headers["content-type"] == "application/x-protobuf"
    assert reply(status=503, headers={"retry-after": "1"}).headers["retry-after"] == "1"
    assert reply(status=503).body == b""
