"""No request costs the server much more than was sent: memory, disk and time grow with the bytes of the request.

Memory and disk are compared with the bytes sent. Time is CPU time, compared with that of an ordinary large request on the
same machine.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.bodies import field_names
from tests.unit.engine.api.asgi import PROTO, Answer, Client
from tinkex._wire.endpoints import ENDPOINTS
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
MEMORY_PER_BYTE, MEMORY_BASE = 40, 64 * MIB
"""A body of up to 1 MiB may be the expansion of nearly nothing, and costs at most 40 times its size as objects."""
DISK_PER_BYTE, DISK_BASE = 8, 2 * MIB
MAX_COST = 5.0
"""CPU time of any request, compared with that of an ordinary one of the largest size."""

FUZZ = settings(
    max_examples=int(os.environ.get("TINKEX_FUZZ_EXAMPLES", "25")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)

UNITS = (
    "{}",
    "[]",
    "0",
    '""',
    "null",
    "-1.5e300",
    '"ab"',
    '{"a":0}',
    "[[0]]",
    '{"type":"encoded_text","tokens":[]}',
)
PROTO_UNITS = tuple(
    bytes.fromhex(unit)
    for unit in ("1a00", "1a020a00", "1a040a020a00", "2200", "2a00", "3a021200", "7a00", "7b7c", "1a021200", "1a021a00")
)  # fmt: skip
TEMPLATES: dict[str, tuple[str, ...]] = {
    "telemetry": ('{"events":[%s]}',),
    "create_custom_loss": ('{"session_id":"s","custom_loss_seq_id":1,"name":"n","inputs":[],"graph":{"nodes":[%s]}}',),
    "asample": (
        '{"sampling_params":{},"base_model":"tiny","prompt":{"chunks":[%s]}}',
        '{"sampling_params":{"stop":[%s]},"base_model":"tiny","prompt":{"chunks":[]}}',
        '{"sampling_params":{},"base_model":"tiny","prompt":{"chunks":[{"type":"encoded_text","tokens":[%s]}]}}',
        '{"sampling_params":{"structured_output":{"json_schema":{"enum":[%s]}}},"base_model":"tiny","prompt":{"chunks":[]}}',
        '{"sampling_params":{"structured_output":{"json_schema":{"anyOf":[%s]}}},"base_model":"tiny","prompt":{"chunks":[]}}',
        '{"sampling_params":{"logit_bias":{"1":[%s]}},"base_model":"tiny","prompt":{"chunks":[]}}',
    ),
    "forward": (
        '{"model_id":"m","seq_id":1,"forward_input":{"loss_fn":"cross_entropy","data":[%s]}}',
        '{"model_id":"m","seq_id":1,"forward_input":{"loss_fn":"l","data":[{"model_input":{"chunks":[%s]},"loss_fn_inputs":{}}]}}',
    ),
    "create_session": ('{"user_metadata":{"a":[%s]}}', '{"tags":[%s]}'),
    "search_sessions": ('{"project_ids":[%s]}',),
}  # fmt: skip
JSON_ENDPOINTS = [
    name
    for name, endpoint in ENDPOINTS.items()
    if endpoint.method == "POST" and endpoint.request is not None and "{" not in endpoint.path
]


@dataclass(frozen=True)
class Hostile:
    """A request: what is sent, and how."""

    endpoint: str
    body: bytes
    headers: dict[str, str]


@dataclass(frozen=True)
class Target:
    client: Client
    engine: Engine
    ordinary_cpu_s: float
    """CPU time of an ordinary request of the largest size."""


@st.composite
def hostile_json(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from([*TEMPLATES, *JSON_ENDPOINTS]))
    fields = field_names(ENDPOINTS[name]) or ["x"]
    template = draw(st.sampled_from([*TEMPLATES.get(name, ()), *(f'{{"{field}":[%s]}}' for field in fields)]))
    unit = draw(st.sampled_from([*UNITS, '"' + "x" * 5000 + '"', " " * 5000 + "0"]))
    size = draw(st.sampled_from([10_000, 250_000, MIB - 1000, 2 * MIB, 24 * MIB]))
    return name, (template % ",".join([unit] * (size // (len(unit) + 1)))).encode()


@st.composite
def hostile_proto(draw: st.DrawFn) -> tuple[str, bytes]:
    unit = draw(st.sampled_from(PROTO_UNITS))
    size = draw(st.sampled_from([10_000, 250_000, MIB, 2 * MIB, 24 * MIB]))
    start = bytes.fromhex("0a016d1001220d63726f73735f656e74726f7079")  # model_id, seq_id, loss_fn
    return "forward_backward", start + unit * (size // len(unit))


def packed(body: bytes, encoding: str) -> bytes:
    if encoding == "zstd":
        return zstandard.ZstdCompressor().compress(body)
    return gzip.compress(body, 6) if encoding == "gzip" else body


def as_request(name: str, body: bytes, encoding: str) -> Hostile:
    # Only a few megabytes are ever sent: the question is what they become.
    if len(body) > 2 * MIB and not encoding:
        encoding = "zstd"
    headers = {"content-type": PROTO if name == "forward_backward" else "application/json"}
    if encoding:
        headers["content-encoding"] = encoding
    return Hostile(name, packed(body, encoding), headers)


HOSTILE = st.builds(
    lambda named, encoding: as_request(*named, encoding),
    hostile_json() | hostile_proto(),
    st.sampled_from(["", "zstd", "gzip"]),
)


def send(client: Client, hostile: Hostile) -> Answer:
    endpoint = ENDPOINTS[hostile.endpoint]
    answer = asyncio.run(client.acall(endpoint.method, endpoint.path, hostile.body, hostile.headers))
    assert answer.status < 500 or answer.status == 503, (answer.status, answer.body)
    return answer


@pytest.fixture(scope="module")
def target(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server with its usual limits."""
    home = tmp_path_factory.mktemp("target")
    engine = Engine(EngineConfig(home=home, models={"tiny": str(tiny_model)}, long_poll_s=0.02))
    engine.start()
    engine.load_models().result()
    client = Client(build_app(engine), engine.api_key)
    tokens = [10_000 + number % 50_000 for number in range(900_000)]
    chunks = [{"type": "encoded_text", "tokens": tokens}]
    body = {"prompt": {"chunks": chunks}, "sampling_params": {}, "base_model": "tiny"}
    ordinary = Hostile("asample", json.dumps(body).encode(), {})
    costs = []
    for _ in range(3):
        started = time.process_time()
        assert (
            "context" in send(client, ordinary).detail
        )  # it is read as a whole, and is longer than the context
        costs.append(time.process_time() - started)
    yield Target(client, engine, sorted(costs)[1])
    engine.close()


def disk_bytes(engine: Engine) -> int:
    return sum(path.stat().st_size for path in engine.config.engine_dir.rglob("*") if path.is_file())


@FUZZ
@given(HOSTILE)
@example(as_request("telemetry", b'{"events":[' + b"{}," * 8_000_000 + b"{}]}", "zstd"))
@example(as_request("create_session", b'{"user_metadata":{"a":"' + b"x" * 3_900_000 + b'"}}', "zstd"))
@example(as_request("forward_backward", b"\x1a\x00" * 12_000_000, "zstd"))
@example(as_request("forward_backward", b"\x1a\x00" * 8_000, ""))
@example(as_request("create_session", b'{"user_metadata":{"a":"' + b"x" * 250_000 + b'"}}', ""))
def test_memory_disk_and_time_grow_with_the_bytes_sent(target: Target, hostile: Hostile) -> None:
    sent = len(hostile.body)
    before = disk_bytes(target.engine)
    started = time.process_time()
    send(target.client, hostile)
    cost = (time.process_time() - started) / target.ordinary_cpu_s
    grown = disk_bytes(target.engine) - before
    tracemalloc.start()
    try:
        send(target.client, hostile)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BASE + MEMORY_PER_BYTE * sent
    assert grown < DISK_BASE + DISK_PER_BYTE * sent
    assert cost < MAX_COST


def test_a_session_stores_no_more_than_was_sent_whatever_is_repeated(target: Target) -> None:
    """Many small requests together: the disk grows by what they carry, not by what they name."""
    requests = [
        as_request("create_session", json.dumps({"user_metadata": {"n": "x" * size}}).encode(), "zstd")
        for size in (60_000, 66_000, 200_000)
    ]
    before = disk_bytes(target.engine)
    statuses = [send(target.client, request).status for request in requests * 5]
    assert statuses == [200, 413, 413] * 5
    assert disk_bytes(target.engine) - before < 5 * 4 * 64 * 1024 + DISK_BASE
