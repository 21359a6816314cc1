"""Sessions: opened late, kept alive, ended once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.recording import Recorder
from tests.scripted import ScriptedServer
from tinkex import types
from tinkex._transport.caller import Caller
from tinkex._transport.retry import RetryPolicy
from tinkex.clients.session import Session
from tinkex.config import Config
from tinkex.errors import APIConnectionError, APIStatusError, ClosedError, ConfigError, InternalServerError
from tinkex.observability.events import (
    HeartbeatFailed,
    HeartbeatLost,
    ServerMessage,
    SessionClosed,
    SessionLost,
    SessionOpened,
)
from tinkex.testing import Reply, Request, reply


def session_on(
    server: ScriptedServer, sink: Recorder | None = None, heartbeat_s: float = 3600.0, **more: Any
) -> Session:
    config = Config(
        api_key="tml-x", base_url="http://mock", tags=("a",), user_metadata={"who": "me"}, project_id="p1"
    )
    policy = RetryPolicy(base_s=0.001, cap_s=0.002, total_s=0.05)
    caller = Caller(server.transport, config, sink=sink, policy=policy)
    return Session(caller, display_name="shown", heartbeat_interval_s=heartbeat_s, **more)


async def test_a_session_is_opened_once_for_all_who_need_it() -> None:
    server = ScriptedServer()
    session = session_on(server)
    assert server.calls == []
    opened = await asyncio.gather(*(session.opened() for _ in range(5)))
    assert {o.session_id for o in opened} == {"sess-1"}
    assert server.names() == ["client_config", "client_dynamic_config", "create_session"]
    created = server.values("create_session")[0]
    assert (created.tags, created.user_metadata) == (["a"], {"who": "me"})
    assert (created.project_id, created.display_name, created.sdk_version) == ("p1", "shown", "0.36.0")
    await session.finish("success")


async def test_the_server_s_settings_are_taken_over() -> None:
    server = ScriptedServer(
        client_config=lambda *_: reply({"fwdbwd_max_chunk_len": 7, "novelty": 1}),
        client_dynamic_config=lambda *_: reply({"sample_cancel_enabled": True}),
    )
    session = session_on(server)
    assert (await session.opened()).client_config.fwdbwd_max_chunk_len == 7
    assert session.dynamic_config.sample_cancel_enabled
    await session.finish("success")


async def test_a_server_without_client_config_is_an_error_and_can_be_retried() -> None:
    answers = [reply({"detail": "x"}, status=500)] * 100

    def config(*_: Any) -> Reply:
        return answers.pop() if answers else reply({})

    session = session_on(ScriptedServer(client_config=config))
    with pytest.raises(InternalServerError):
        await session.opened()
    answers.clear()
    assert (await session.opened()).session_id == "sess-1"
    await session.finish("success")


async def test_messages_of_the_server_are_emitted() -> None:
    recorder = Recorder()
    created = {"session_id": "s9", "info_message": "hello", "warning_message": "old client"}
    session = session_on(ScriptedServer(create_session=lambda *_: reply(created)), recorder)
    await session.opened()
    assert recorder.of(SessionOpened) == [SessionOpened("s9")]
    assert recorder.of(ServerMessage) == [
        ServerMessage("s9", "info", "hello"),
        ServerMessage("s9", "warning", "old client"),
    ]
    await session.finish("success")


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.005)


async def test_the_session_is_kept_alive() -> None:
    server = ScriptedServer()
    session = session_on(server, heartbeat_s=0.01)
    await session.opened()
    await until(lambda: len(server.values("session_heartbeat")) >= 3)
    assert server.values("session_heartbeat")[0].session_id == "sess-1"
    await session.finish("success")
    beats = len(server.values("session_heartbeat"))
    await asyncio.sleep(0.05)
    assert len(server.values("session_heartbeat")) == beats


async def test_the_dynamic_configuration_is_refreshed_and_kept_when_that_fails() -> None:
    answers = [
        reply({"refresh_interval_sec": 0, "sample_cancel_max_batch_size": 1}),
        reply({"refresh_interval_sec": 0, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 2}),
    ]
    server = ScriptedServer(
        client_dynamic_config=lambda *_: answers.pop(0) if answers else reply({"detail": "x"}, status=500)
    )
    session = session_on(server, heartbeat_s=0.01, min_refresh_interval_s=0.01)
    await session.opened()
    assert session.dynamic_config.sample_cancel_max_batch_size == 1
    await until(lambda: len(server.values("client_dynamic_config")) >= 4)
    assert session.dynamic_config.sample_cancel_enabled
    assert session.dynamic_config.sample_cancel_max_batch_size == 2
    await session.finish("success")


async def test_the_dynamic_configuration_is_not_requested_more_often_than_the_minimum_interval() -> None:
    server = ScriptedServer(client_dynamic_config=lambda *_: reply({"refresh_interval_sec": 0}))
    session = session_on(server, heartbeat_s=0.005)
    await session.opened()
    await until(lambda: len(server.values("session_heartbeat")) >= 5)
    assert len(server.values("client_dynamic_config")) == 1
    await session.finish("success")


async def test_heartbeats_end_quietly_with_the_connections() -> None:
    server = ScriptedServer()
    session = session_on(server, heartbeat_s=0.01)
    await session.opened()
    await until(lambda: len(server.values("session_heartbeat")) >= 1)
    await session.caller.close()
    heartbeats = asyncio.all_tasks() - {asyncio.current_task()}
    assert await asyncio.gather(*heartbeats) == [None] * len(heartbeats)


@pytest.mark.parametrize("status", [410, 404, 401])
async def test_heartbeats_stop_when_the_server_rejects_them(status: int) -> None:
    recorder = Recorder()
    server = ScriptedServer(session_heartbeat=lambda *_: reply({"detail": "gone"}, status=status))
    session = session_on(server, recorder, heartbeat_s=0.01)
    await session.opened()
    await until(lambda: recorder.of(SessionLost))
    await asyncio.sleep(0.05)
    assert len(server.values("session_heartbeat")) == 1
    await session.finish("success")


@pytest.mark.parametrize("trouble", [reply(status=503), reply(status=429), APIConnectionError(None, "cut")])
async def test_transient_failures_never_end_a_session_but_are_emitted(
    trouble: Reply | APIConnectionError,
) -> None:
    def answer(*_: Any) -> Reply:
        if isinstance(trouble, APIConnectionError):
            raise trouble
        return trouble

    recorder = Recorder()
    server = ScriptedServer(session_heartbeat=answer)
    session = session_on(server, recorder, heartbeat_s=0.01, heartbeat_warning_s=0.03)
    await session.opened()
    await until(lambda: len(recorder.of(HeartbeatLost)) >= 2)
    assert not recorder.of(SessionLost)
    server.answers.clear()
    beats = len(server.values("session_heartbeat"))
    await until(lambda: len(server.values("session_heartbeat")) > beats + 1)
    await session.finish("success")


@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        ("session_heartbeat", ValueError("a mistake of a transport")),
        ("session_heartbeat", ConfigError("the credential command failed")),
        ("session_heartbeat", Reply(200, {}, b"<html>")),
        ("client_dynamic_config", ValueError("a mistake of a transport")),
        ("client_dynamic_config", Reply(200, {}, b"<html>")),
    ],
    ids=str,
)
async def test_an_unexpected_exception_is_an_event_and_the_heartbeats_continue(
    name: str, trouble: Exception | Reply
) -> None:
    broken = False

    def answer(*_: Any) -> Reply:
        if broken and isinstance(trouble, Exception):
            raise trouble
        return trouble if broken and isinstance(trouble, Reply) else reply({"refresh_interval_sec": 0})

    recorder = Recorder()
    server = ScriptedServer(**{name: answer})
    session = session_on(
        server, recorder, heartbeat_s=0.005, heartbeat_warning_s=0.02, min_refresh_interval_s=0.005
    )
    await session.opened()
    broken = True
    await until(lambda: len(recorder.of(HeartbeatFailed)) >= 2)
    assert recorder.of(HeartbeatFailed)[0].session_id == "sess-1"
    if name == "session_heartbeat":
        await until(lambda: recorder.of(HeartbeatLost))
    broken = False
    beats = len(server.values("session_heartbeat"))
    await until(lambda: len(server.values("session_heartbeat")) > beats + 1)
    assert not recorder.of(SessionLost)
    await session.finish("success")


async def test_heartbeats_of_a_session_whose_engine_was_closed_end_with_an_event() -> None:
    def answer(*_: Any) -> Reply:
        raise ClosedError("the engine was closed")

    recorder = Recorder()
    session = session_on(ScriptedServer(session_heartbeat=answer), recorder, heartbeat_s=0.005)
    await session.opened()
    await until(lambda: recorder.of(SessionLost))
    assert recorder.of(SessionLost) == [SessionLost("sess-1", "the engine was closed")]
    await session.finish("success")


async def test_a_session_whose_server_hangs_holds_up_no_other() -> None:
    """Neither the heartbeats of others nor a new session wait for one that gets no answer."""
    hung = asyncio.Event()

    async def never(value: Any, request: Request) -> Reply:
        hung.set()
        await asyncio.Event().wait()
        raise AssertionError

    five = asyncio.Event()

    def count(value: Any, request: Request) -> Reply:
        if quick.names().count("session_heartbeat") == 5:
            five.set()
        return reply({})

    slow, quick = ScriptedServer(session_heartbeat=never), ScriptedServer(session_heartbeat=count)
    waiting = session_on(slow, heartbeat_s=0.001)
    await waiting.opened()
    await hung.wait()
    beating = session_on(quick, heartbeat_s=0.001)
    await beating.opened()
    await five.wait()
    assert slow.names().count("session_heartbeat") == 1, "it still waits for its answer"
    await session_on(quick).opened()
    for session in (waiting, beating):
        await session.finish("success")


class Forgetful(ScriptedServer):
    """Gives every session a name of its own, and forgets those that a test names."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: dict[str, int] = {}
        self.num_sessions = 0

    def on_create_session(self, value: Any, request: Request) -> Reply:
        self.num_sessions += 1
        return reply({"session_id": f"sess-{self.num_sessions}"})

    def on_session_heartbeat(self, value: types.SessionHeartbeatRequest, request: Request) -> Reply:
        status = self.forgotten.get(value.session_id)
        return reply({}) if status is None else reply({"detail": "what session?"}, status=status)


@pytest.mark.parametrize("status", [404, 410])
async def test_a_session_that_the_server_forgot_is_followed_by_another_one(status: int) -> None:
    server, sink = Forgetful(), Recorder()
    session = session_on(server, sink)
    assert not await session.renew_if_lost(), "there was none"
    first = await session.opened()
    assert not await session.renew_if_lost(), "it is well"
    server.forgotten["sess-1"] = status
    assert any(await asyncio.gather(session.renew_if_lost(), session.renew_if_lost()))
    second = await session.opened()
    assert (first.session_id, second.session_id) == ("sess-1", "sess-2")
    assert [event.session_id for event in sink.of(SessionLost)] == ["sess-1"]
    assert [event.session_id for event in sink.of(SessionOpened)] == ["sess-1", "sess-2"], "one, not two"
    await session.finish("success")
    assert [event.session_id for event in sink.of(SessionClosed)] == ["sess-2"]
    with pytest.raises(ClosedError):
        await session.renew_if_lost()


@pytest.mark.parametrize("status", [401, 403, 503])
async def test_an_error_of_the_heartbeat_other_than_not_found_does_not_renew_the_session(status: int) -> None:
    server = Forgetful()
    session = session_on(server)
    await session.opened()
    server.forgotten["sess-1"] = status
    with pytest.raises(APIStatusError):
        await session.renew_if_lost()
    assert (await session.opened()).session_id == "sess-1"
    await session.finish("success")


async def test_closing_reports_the_outcome_once() -> None:
    recorder = Recorder()
    server = ScriptedServer()
    session = session_on(server, recorder)
    await session.opened()
    await session.finish("errored", "ran out of data")
    await session.finish("success")
    finish: types.FinishSessionRequest = server.values("finish_session")[0]
    assert (finish.reason.type, finish.detail) == ("errored", "ran out of data")
    assert len(server.values("finish_session")) == 1
    assert server.transport.closed
    assert recorder.of(SessionClosed) == [SessionClosed("sess-1", "errored")]
    with pytest.raises(ClosedError, match="closed"):
        await session.opened()


async def test_a_session_that_was_never_opened_closes_without_a_request() -> None:
    server = ScriptedServer()
    await session_on(server).finish("success")
    assert server.calls == []


@pytest.mark.slow
async def test_a_server_that_is_gone_does_not_keep_a_program_from_ending() -> None:
    def gone(_: Any, request: Request) -> Reply:
        raise APIConnectionError(None, "cut")

    recorder = Recorder()
    session = session_on(ScriptedServer(finish_session=gone), recorder)
    await session.opened()
    await session.finish("success")
    assert recorder.of(SessionClosed) == [SessionClosed("sess-1", "success", "cut")]


async def test_closing_while_opening_ends_the_opening() -> None:
    async def never(*_: Any) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    session = session_on(ScriptedServer(client_config=never))
    opening = asyncio.ensure_future(session.opened())
    await asyncio.sleep(0.01)
    await session.finish("interrupted")
    with pytest.raises(ClosedError):
        await opening
