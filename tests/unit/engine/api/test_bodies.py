"""Bodies are received, decompressed and decoded within limits, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.unit.engine.api.asgi import PROTO, Client
from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex._wire import tinkex_wire_pb2 as pb
from tinkex._wire.endpoints import ENDPOINTS
from tinkex.engine.api.app import build_app
from tinkex.engine.api.bodies import MAX_EXPANSION, MIN_EXPANDED_BYTES, decompress
from tinkex.engine.api.body_budget import BodyBudget, BodyReservation
from tinkex.engine.api.compatible.routes import ROUTE_HANDLERS
from tinkex.engine.api.limits import LARGE_BODIES, OTHER_BODIES, SMALL_BODY
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.errors import Busy, InvalidInput, OverQuota, TooLarge, Unsupported
from tinkex.types import AdamParams, Datum, ForwardBackwardRequest, ModelInput, OptimStepRequest

MIB = 1024 * 1024
Receive = Callable[[], Awaitable[dict[str, Any]]]


@pytest.fixture(scope="module")
def roomy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with the limits of a server; nothing is run on it."""
    opened = Engine(
        EngineConfig(
            home=tmp_path_factory.mktemp("roomy"), models={"tiny": str(tiny_model)}, request_stall_s=0.2
        )
    )
    opened.store.users.add_key("bob", "tml-bob", 0.0)
    yield opened
    opened.close()


def packed(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


def telemetry(num_events: int, event: str = "{}") -> bytes:
    return b'{"events":[' + ",".join([event] * num_events).encode() + b"]}"


async def call(app: Any, key: str, path: str, receive: Receive, headers: dict[str, str] | None = None) -> int:
    """The status of a request whose body arrives as ``receive`` says."""
    given = {"content-type": "application/json", "x-api-key": key, **(headers or {})}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": f"/api/v1/{path}",
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    statuses: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    return statuses[0]


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_above_the_limit_is_rejected(ada: Client) -> None:
    answer = ada.post("create_session", {"display_name": "x" * 300_000})
    assert answer.status == 413
    assert "200000 bytes" in answer.detail
    announced = ada.post("create_session", b"{}", content_length="999999999")
    assert announced.status == 413


def test_compressed_bodies_are_decompressed(ada: Client) -> None:
    for encoding, pack in (("gzip", gzip.compress), ("zstd", zstandard.compress)):
        answer = ada.post("create_session", pack(b'{"tags":["a"]}'), content_encoding=encoding)
        assert answer.status == 200


def test_a_small_body_that_decompresses_into_a_large_one_is_rejected(ada: Client) -> None:
    bomb = zstandard.compress(b" " * 10_000_000)
    assert len(bomb) < 5000
    assert ada.post("create_session", bomb, content_encoding="zstd").status == 413


@pytest.mark.parametrize(
    ("encoding", "error"), [("gzip", InvalidInput), ("zstd", InvalidInput), ("br", Unsupported)]
)
def test_bodies_that_do_not_match_their_content_encoding_are_rejected(
    encoding: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=encoding):
        decompress(b"plain text", encoding, 1000)


def test_decompression_stops_at_the_limit() -> None:
    assert decompress(gzip.compress(b"x" * 10), "gzip", 10) == b"x" * 10
    with pytest.raises(TooLarge):
        decompress(gzip.compress(b"x" * 11), "gzip", 10)


@pytest.mark.parametrize(("num_bytes", "path"), [(16 * MIB, "telemetry"), (16 * MIB, "create_custom_loss"),
                                                 (64 * MIB, "asample"), (64 * MIB, "forward")])  # fmt: skip
@pytest.mark.slow
def test_a_few_kilobytes_never_become_millions_of_objects(roomy: Engine, num_bytes: int, path: str) -> None:
    bomb = packed(b'{"events":[' + b"{}," * (num_bytes // 3) + b"{}]}")
    assert len(bomb) < 10_000
    client = Client(build_app(roomy), roomy.api_key)
    tracemalloc.start()
    try:
        answer = client.post(path, bomb, content_encoding="zstd")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status == 413
    assert peak < 16 * MIB


def test_a_body_that_expands_too_much_is_rejected_with_the_ratio(roomy: Engine) -> None:
    client = Client(build_app(roomy), roomy.api_key)
    answer = client.post("asample", packed(b" " * (8 * MIB)), content_encoding="zstd")
    assert answer.status == 413
    assert f"{MAX_EXPANSION} times" in answer.detail
    assert "without Content-Encoding" in answer.detail


def test_a_body_may_expand_to_a_megabyte_whatever_its_ratio() -> None:
    fits = b"x" * MIN_EXPANDED_BYTES
    assert decompress(packed(fits), "zstd", 2 * MIN_EXPANDED_BYTES) == fits
    with pytest.raises(TooLarge, match="times"):
        decompress(packed(fits + b"x"), "zstd", 2 * MIN_EXPANDED_BYTES)


def test_a_frame_that_needs_more_memory_than_http_allows_is_rejected() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressor.compress(b"[]") + compressor.flush()
    with pytest.raises(InvalidInput, match="memory"):
        decompress(frame, "zstd", 1000)


def empty_datums(count: int) -> bytes:
    return pb.ForwardBackwardRequest(model_id="run", seq_id=1).SerializeToString() + b"\x1a\x00" * count


@pytest.mark.parametrize(
    ("path", "body", "content_type"),
    [
        ("telemetry", telemetry(10_000), "application/json"),
        ("asample", b'{"prompt":{"chunks":[' + b"{}," * 100_000 + b"{}]}}", "application/json"),
        ("forward", b'{"forward_input":{"data":[' + b"[]," * 200_000 + b"[]]}}", "application/json"),
        ("forward_backward", empty_datums(200_000), PROTO),
        ("session_heartbeat", b"[" + b"{}," * 10_000 + b"{}]", "application/json"),
    ],
)
def test_too_many_values_are_rejected_before_objects_are_built(
    roomy: Engine, path: str, body: bytes, content_type: str
) -> None:
    client = Client(build_app(roomy), roomy.api_key)
    client.get("healthz")
    tracemalloc.start()
    try:
        answer = client.post(path, body, content_type=content_type)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status == 413
    assert "values" in answer.detail
    assert peak < 4 * len(body) + MIB


def test_the_number_of_a_pass_with_too_many_values_is_used_up(ada: Client, engine: Engine) -> None:
    del engine
    run = ada.create()
    message = pb.ForwardBackwardRequest(model_id=run, seq_id=1).SerializeToString()
    rejected = ada.post(
        "forward_backward", message + b"\x22\x00" * 90_000 + b"\x1a\x00" * 9, content_type=PROTO
    )
    assert rejected.status in {400, 413}
    step = ada.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}})
    assert "metrics" in ada.result(step).json


def test_small_calls_have_small_limits(roomy: Engine) -> None:
    client = Client(build_app(roomy), roomy.api_key)
    answer = client.post("session_heartbeat", b'{"session_id":"' + b"x" * SMALL_BODY.max_bytes + b'"}')
    assert answer.status == 413
    assert str(SMALL_BODY.max_bytes) in answer.detail
    assert {*OTHER_BODIES, *LARGE_BODIES} <= {*ENDPOINTS, *ROUTE_HANDLERS}


def test_health_polls_complete_while_a_body_is_decoded(roomy: Engine) -> None:
    app = build_app(roomy)
    client = Client(app)
    body = telemetry(900, json.dumps({"event": "GENERIC_EVENT", "event_data": {"text": "x" * 4000}}))

    async def check() -> int:
        received = False

        async def receive() -> dict[str, Any]:
            nonlocal received
            received = True
            return part(body, more=False)

        sending = asyncio.create_task(call(app, roomy.api_key, "telemetry", receive))
        completed = 0
        while not sending.done():
            await asyncio.sleep(0)
            if received and not sending.done():
                assert (await client.acall("GET", "/api/v1/healthz")).status in {200, 503}
                completed += not sending.done()
        assert sending.result() == 200
        return completed

    assert asyncio.run(check()) >= 1


def test_one_users_bodies_in_flight_are_bounded_and_others_are_served(
    tmp_path: Path, tiny_model: Path
) -> None:
    limit = 200_000
    engine = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}, max_body_bytes=limit))
    engine.store.users.add_key("bob", "tml-bob", 0.0)
    app = build_app(engine)

    async def check() -> None:
        arrived, finish = asyncio.Semaphore(0), asyncio.Event()

        def slow_body() -> Receive:
            parts = [part(b" " * (limit - 10))]

            async def receive() -> dict[str, Any]:
                if parts:
                    return parts.pop()
                arrived.release()
                await finish.wait()
                return part(b"{}", more=False)

            return receive

        slow = [asyncio.create_task(call(app, engine.api_key, "asample", slow_body())) for _ in range(2)]
        for _ in slow:
            await arrived.acquire()
        ada, bob = Client(app, engine.api_key), Client(app, "tml-bob")
        rejected = await ada.acall("POST", "/api/v1/create_session", {"tags": ["x" * 1000]})
        assert rejected.status == 429
        assert str(2 * limit) in rejected.detail
        assert rejected.json["queue_state"] == "paused_rate_limit"
        assert (await bob.acall("POST", "/api/v1/create_session", {"tags": ["x" * 1000]})).status == 200
        finish.set()
        assert set(await asyncio.gather(*slow)) == {400}
        assert (await ada.acall("POST", "/api/v1/create_session", {"tags": ["x" * 1000]})).status == 200

    try:
        asyncio.run(check())
    finally:
        engine.close()


def test_the_bodies_of_all_users_are_bounded() -> None:
    budget = BodyBudget(max_bytes_per_user=100, max_bytes=150)
    first, second = BodyReservation(budget, "ada"), BodyReservation(budget, "bob")
    first.add(100)
    with pytest.raises(OverQuota):
        BodyReservation(budget, "ada").add(1)
    with pytest.raises(Busy, match="all users"):
        second.add(60)
    second.add(50)
    first.release()
    first.add(70)  # by a thread that did not know that the caller is gone
    assert budget.num_bytes == 50


@pytest.mark.slow
def test_a_body_that_trickles_is_given_up(roomy: Engine) -> None:
    app = build_app(roomy)

    async def trickle() -> dict[str, Any]:
        await asyncio.sleep(0.02)  # far below the time for which a body may stall
        return part(b" ")

    assert asyncio.run(asyncio.wait_for(call(app, roomy.api_key, "asample", trickle), 60)) == 408


@pytest.mark.slow
def test_a_slow_body_of_many_bytes_has_the_time_it_needs(roomy: Engine) -> None:
    app = build_app(roomy)
    waits = [0.05] * 8  # twice the time for which a body may stall

    async def receive() -> dict[str, Any]:
        if not waits:
            return part(b'{"events":[]}', more=False)
        await asyncio.sleep(waits.pop())
        return part(b" " * 10_000)

    assert asyncio.run(call(app, roomy.api_key, "telemetry", receive)) == 200


def test_a_caller_who_disconnects_is_logged_as_499(roomy: Engine, caplog: pytest.LogCaptureFixture) -> None:
    app = build_app(roomy)
    messages = [part(b'{"tags"'), {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    with caplog.at_level(logging.INFO, "tinkex.access"):
        asyncio.run(call(app, roomy.api_key, "create_session", receive))
    assert [record.fields["status"] for record in caplog.records if hasattr(record, "fields")] == [499]


def test_a_large_pass_is_recorded_while_the_event_loop_serves_others(engine: Engine, ada: Client) -> None:
    run = ada.create()
    datum = Datum(ModelInput.from_ints([5] * 500), {"target_tokens": [6] * 500})
    large = ForwardBackwardRequest(model_id=run, seq_id=1, data=[datum] * 20, loss_fn="cross_entropy")
    small = OptimStepRequest(model_id=run, seq_id=2, adam_params=AdamParams())
    holding, release, released = threading.Event(), threading.Event(), []

    def hold() -> None:
        with engine.store.database.transaction():
            holding.set()
            released.append(release.wait(20))

    async def check() -> None:
        submissions = [
            asyncio.create_task(engine.accept("local", large, wire_proto.encode_forward_backward(large))),
            asyncio.create_task(engine.accept("local", small, wire_json.encode(small))),
        ]
        for _ in range(3):
            await asyncio.sleep(0)
        assert not any(submission.done() for submission in submissions)
        release.set()  # never before the loop comes here
        first, second = await asyncio.gather(*submissions)
        assert first.request_id != second.request_id

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(20)
    try:
        asyncio.run(check())
    finally:
        release.set()
        holder.join()
    assert released == [True]
