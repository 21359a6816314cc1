"""Administration: the audit log, usage, a session's trace, and moving sessions between projects."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from starlette.requests import Request

from tests.unit.engine.api.asgi import PROTO, Client
from tests.unit.engine.api.test_downloads import save
from tests.unit.engine.api.test_sampling import request, sampler
from tests.unit.engine.api.test_training import TOKENS, pass_body, send_pass
from tinkex._wire import proto as wire_proto
from tinkex.engine.api.app import build_app
from tinkex.engine.api.audit import MAX_FAILED_LOGINS, FailedLogins
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput


def entries(client: Client, **query: str) -> list[dict[str, Any]]:
    answer = client.get("audit?" + "&".join(f"{k}={v}" for k, v in query.items()))
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json["entries"]
    return found


def usage(client: Client, *, version: str = "0.38.0") -> list[dict[str, Any]]:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [quote(when.isoformat()) for when in (hour - timedelta(hours=1), hour + timedelta(hours=1))]
    path = f"/api/v1/billing/usage/events?starting_on={window[0]}&ending_before={window[1]}"
    answer = client.call("GET", path, headers={"x-stainless-package-version": version})
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json["data"]
    return found


@pytest.fixture
def carol(engine: Engine) -> Client:
    """A user that no other test uses."""
    key, _ = engine.store.users.create_key(f"carol-{len(engine.store.users.all_keys())}", 0.0)
    return Client(build_app(engine), key)


def test_requests_of_a_user_are_in_the_audit_log(ada: Client, bob: Client, carol: Client) -> None:
    run = carol.create()
    path = save(carol, run, 1)
    base = f"/api/v1/training_runs/{run}/checkpoints/weights/kept"
    carol.call("POST", f"{base}/publish")
    carol.call("DELETE", f"{base}/publish")
    carol.call("PUT", f"{base}/ttl", {"ttl_seconds": 3600})
    carol.get(f"training_runs/{run}/checkpoints/weights/kept/archive")
    carol.call("DELETE", base)
    events = ["create", "publish", "unpublish", "ttl_set", "read", "delete"]
    found = entries(carol, event_type="checkpoints")
    assert [entry["event"] for entry in found] == [f"checkpoint_{event}" for event in events]
    assert {entry["tinker_path"] for entry in found} == {path}
    assert {entry["model_id"] for entry in found} == {run}
    assert {entry["event_details"]["user"] for entry in found} == {found[0]["event_details"]["user"]}
    everything = [entry["event"] for entry in entries(carol)]
    assert everything[:2] == ["session_create", "run_create"]
    assert entries(carol, day="2001-01-01") == []
    assert entries(carol, event_type="teams") == []
    # The server's own user gets the entries of all users, others only their own.
    seen = [[entry.get("tinker_path") for entry in entries(client)] for client in (ada, bob)]
    assert path in seen[0]
    assert path not in seen[1]


def test_a_rejected_request_is_not_in_the_audit_log(carol: Client) -> None:
    carol.call("DELETE", "/api/v1/training_runs/nobody/checkpoints/weights/x")
    assert entries(carol) == []


def test_failed_logins_are_recorded_once_per_interval(engine: Engine, ada: Client) -> None:
    stranger = Client(build_app(engine), "tml-guess", host="203.0.113.9")
    for _ in range(5):
        assert stranger.get("sessions").status == 401
    noted = [entry for entry in entries(ada, event_type="organizations") if entry["event"] == "login_refused"]
    assert [n["event_details"]["host"] for n in noted].count("203.0.113.9") == 1
    assert "tml-guess" not in json.dumps(noted)


@pytest.mark.slow
def test_requests_without_a_key_cannot_fill_the_audit_log(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}))
    app = build_app(engine)

    async def guess() -> None:
        for number in range(300):
            stranger = Client(app, "tml-guess", host=f"2001:db8::{number:x}" + "0" * 1000)
            assert (await stranger.acall("GET", f"/api/v1/sessions/{'s' * 50_000}")).status == 401

    asyncio.run(guess())
    log = engine.store.audit.between(None, 0, time.time() + 1, None, 1000)
    engine.close()
    assert len(log) == MAX_FAILED_LOGINS
    assert sum(len(json.dumps(dict(row.details))) for row in log) < 2000 * len(log)


@pytest.mark.slow
async def test_requests_beyond_the_limit_are_counted_in_one_entry(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}))
    failed_logins = FailedLogins(interval_s=0.2, max_entries=2)

    def rejected(host: str) -> Request:
        return Request(
            {"type": "http", "client": (host, 1), "path": "/", "headers": [], "server": ("localhost", 80)}
        )

    def log() -> list[tuple[str, object]]:
        rows = engine.store.audit.between(None, 0, time.time() + 1, None, 1000)
        return [(row.event, row.details.get("host", row.details.get("further_requests"))) for row in rows]

    for host in ("a", "a", "b", "c", "d"):
        failed_logins.record(engine, rejected(host))
    expected: list[tuple[str, object]] = [("login_refused", "a"), ("login_refused", "b")]
    assert log() == expected
    while len(log()) < 3:  # noqa: ASYNC110 -- waits for a row of the database
        await asyncio.sleep(0.01)
    assert log() == [*expected, ("logins_refused", 3)]
    failed_logins.record(engine, rejected("c"))
    assert log()[-1] == ("login_refused", "c")
    engine.close()


@pytest.mark.parametrize("query", ["event_type=everything", "day=yesterday"])
def test_an_invalid_audit_log_query_is_rejected(ada: Client, query: str) -> None:
    assert ada.get(f"audit?{query}").status == 400


def test_usage_counts_tokens_and_checkpoints_once(carol: Client, bob: Client) -> None:
    session = carol.session()
    run = carol.create(session)
    carol.result(send_pass(carol, pass_body(run, 1)), accept=PROTO)
    send_pass(carol, pass_body(run, 1))  # a retry
    save(carol, run, 2)
    sampler_id = sampler(carol, session)
    for seq_id in (0, 1):
        carol.result(carol.post("asample", request(sampler_id, seq_id, num_samples=2)), accept=PROTO)
    found = usage(carol)
    counted = {(e["event_info"]["type"], e["event_info"].get("cached")): e["event_info"] for e in found}
    assert counted["training", None]["token_count"] == len(TOKENS) - 1
    assert counted["sampling_sample", None]["token_count"] == 12
    prompts = [info["token_count"] for (kind, _), info in counted.items() if kind == "sampling_prefill"]
    assert sum(prompts) == 6
    assert counted["checkpoint", None]["count"] == 1
    assert {e["session_id"] for e in found} == {session}
    assert {e["base_model"] for e in found} == {"tiny"}
    assert {e["estimated_cost_usd"] for e in found} == {0.0}
    assert session not in {e["session_id"] for e in usage(bob)}


def test_usage_counts_tokens_as_sent_and_the_trace_also_as_computed(engine: Engine, carol: Client) -> None:
    session = carol.session()
    run = carol.create(session)
    prompt = list(range(5, 25))
    data = [
        Datum(ModelInput.from_ints([*prompt, *answer]), {"target_tokens": [7] * (20 + len(answer))})
        for answer in ([30], [40, 41], [40, 42, 43])
    ]
    body = wire_proto.encode_forward_backward(ForwardBackwardRequest(run, 1, data, "cross_entropy"))
    carol.result(send_pass(carol, body), accept=PROTO)
    assert [e["event_info"]["token_count"] for e in usage(carol)] == [21 + 22 + 23]
    address = carol.get(f"sessions/{session}/trace_export").json["url"]
    trace = Client(build_app(engine)).call("GET", urlsplit(address).path).json
    [args] = [e["args"] for e in trace["traceEvents"] if e["ph"] == "b" and e["name"] == "forward_backward"]
    assert (args["num_tokens"], args["tokens_computed"]) == (21 + 22 + 23, 20 + 1 + 2 + 3)


def test_usage_counts_storage_over_time(engine: Engine, carol: Client) -> None:
    run = carol.create()
    save(carol, run, 1)
    for _ in range(2):
        engine.run_retention()
    stored = [e["event_info"] for e in usage(carol) if e["event_info"]["type"] == "storage"]
    assert sum(each["gigabyte_hours"] for each in stored) > 0
    carol.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/kept")
    engine.run_retention()
    later = [e["event_info"] for e in usage(carol) if e["event_info"]["type"] == "storage"]
    assert later == stored, "deleted checkpoints are not counted"


@pytest.mark.parametrize(
    ("version", "later"), [("0.25.0", set()), ("0.30.4", set()), ("0.31.0", {"free"}), ("0.38.0", {"free"})]
)
def test_old_clients_receive_storage_without_the_fields_they_reject(
    engine: Engine, carol: Client, version: str, later: set[str]
) -> None:
    save(carol, carol.create(), 1)
    engine.run_retention()
    stored = [e["event_info"] for e in usage(carol, version=version) if e["event_info"]["type"] == "storage"]
    assert stored
    assert {name for each in stored for name in each} == {"type", "gigabyte_hours"} | later


@pytest.mark.parametrize(
    "window",
    [
        ("", ""),
        ("2026-07-13T00:00:00Z", "2026-07-13T00:00:00Z"),
        ("2026-07-13T00:30:00Z", "2026-07-14T00:00:00Z"),
    ],
)
def test_an_invalid_time_range_is_rejected(ada: Client, window: tuple[str, str]) -> None:
    answer = ada.get(f"billing/usage/events?starting_on={window[0]}&ending_before={window[1]}")
    assert answer.status == 400


def test_the_trace_of_a_session_shows_its_operations(engine: Engine, carol: Client, bob: Client) -> None:
    session = carol.session()
    run = carol.create(session)
    carol.result(send_pass(carol, pass_body(run, 1)), accept=PROTO)
    sampler_id = sampler(carol, session)
    carol.result(carol.post("asample", request(sampler_id)), accept=PROTO)
    answer = carol.get(f"sessions/{session}/trace_export").json
    assert answer["status"] == "ready"
    trace = Client(build_app(engine)).call("GET", urlsplit(answer["url"]).path).json
    begun = [e for e in trace["traceEvents"] if e["ph"] == "b" and e["name"] != "queued"]
    ended = {(e["id"], e["name"]): e["ts"] for e in trace["traceEvents"] if e["ph"] == "e"}
    assert [e["name"] for e in begun] == ["create_model", "forward_backward", "sample"]
    assert all(ended[e["id"], e["name"]] >= e["ts"] for e in begun)
    assert begun[1]["args"]["num_tokens"] == len(TOKENS) - 1
    rows = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert rows == {run, sampler_id}
    assert bob.get(f"sessions/{session}/trace_export").status == 404


def test_the_trace_shows_pending_operations(engine: Engine, carol: Client) -> None:
    session = carol.session()
    run = carol.create(session)
    waiting = send_pass(carol, pass_body(run, 2)).json["request_id"]  # seq_id 1 is missing
    url = carol.get(f"sessions/{session}/trace_export").json["url"]
    events = Client(build_app(engine)).call("GET", urlsplit(url).path).json["traceEvents"]
    assert [e["ph"] for e in events if e.get("id") == waiting] == ["b"]
    assert next(e for e in events if e.get("id") == waiting)["args"]["pending"]


def test_a_session_moves_into_a_project_with_its_checkpoints(carol: Client, bob: Client) -> None:
    session = carol.session()
    run = carol.create(session)
    move = f"/api/v1/sessions/{session}/project"
    assert bob.call("PUT", move, {"project_id": "theirs"}).status == 404
    assert carol.call("PUT", move, {"project_id": ""}).status == 400
    assert carol.call("PUT", move, {"project_id": "mine"}).status == 200
    found = carol.get("training_runs?project_id=mine").json["training_runs"]
    assert [each["training_run_id"] for each in found] == [run]
    assert carol.get("training_runs?project_id=other").json["training_runs"] == []
