from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.store import SessionRow
from tinkex.engine.store.users import LOCAL_USER


def test_clients_are_configured(ada: Client) -> None:
    config = ada.post("client/config", {"sdk_version": "0.36.0"}).json
    assert config["pjwt_auth_enabled"] is True
    assert config["sample_use_retrieve_futures"] is True
    assert config["parallel_fwdbwd_chunks"] is True
    assert ada.post("client/dynamic_config", {}).json["sample_cancel_enabled"] is True


def test_telemetry_is_accepted(ada: Client) -> None:
    batch = {
        "events": [{"event": "SESSION_START"}],
        "session_id": "x",
        "platform": "Linux",
        "sdk_version": "0.36.0",
    }
    assert ada.post("telemetry", batch).json == {"status": "accepted"}


def test_capabilities_list_the_served_models(ada: Client) -> None:
    ada.create()
    (model,) = ada.get("get_server_capabilities").json["supported_models"]
    assert model == {
        "model_name": "tiny",
        "max_context_length": 512,
        "trainable": True,
        "sampleable": True,
        "model_id": "tiny",
        "arch": "llama",
    }


def test_a_session_is_active_from_creation_to_its_first_finish(ada: Client) -> None:
    created = ada.post(
        "create_session",
        {
            "tags": ["t"],
            "user_metadata": {"a": 1},
            "sdk_version": "0.36.0",
            "display_name": "d",
            "type": "create_session",
        },
    )
    session = created.json["session_id"]
    assert ada.post("session_heartbeat", {"session_id": session}).json == {"type": "session_heartbeat"}
    run = ada.create(session)
    got = ada.get(f"sessions/{session}?access_scope=owned").json
    assert got == {
        "training_run_ids": [run],
        "sampler_ids": [],
        "user_metadata": {"a": "1"},
        "display_name": "d",
    }
    assert session in ada.get("sessions?limit=20&offset=0&access_scope=owned").json["sessions"]
    for _ in range(2):
        finish = ada.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        assert finish.status == 200
    assert ada.post("session_heartbeat", {"session_id": session}).status == 410


def test_sessions_of_others_do_not_exist(ada: Client, bob: Client) -> None:
    session = ada.session()
    assert bob.get(f"sessions/{session}").status == 404
    assert bob.post("session_heartbeat", {"session_id": session}).status == 404
    assert session not in bob.get("sessions").json["sessions"]
    assert bob.post(f"sessions/{session}/finish", {"reason": {"type": "errored"}}).status == 404


def test_a_published_checkpoint_makes_its_session_accessible_and_no_more(ada: Client, bob: Client) -> None:
    session = ada.session()
    run, private = ada.create(session, 0), ada.create(session, 1)
    for each in (run, private):
        ada.result(ada.post("save_weights", {"model_id": each, "seq_id": 1, "path": "kept"}))

    def seen(scope: str) -> tuple[bool, int]:
        listed = bob.get(f"sessions?limit=1000&access_scope={scope}").json["sessions"]
        return session in listed, bob.get(f"sessions/{session}?access_scope={scope}").status

    assert seen("accessible") == (False, 404)
    publish = f"/api/v1/training_runs/{run}/checkpoints/weights/kept/publish"
    assert ada.call("POST", publish).status == 200
    assert seen("owned") == (False, 404)
    assert seen("accessible") == (True, 200)
    assert bob.get(f"sessions/{session}?access_scope=accessible").json == {
        "training_run_ids": [run],
        "sampler_ids": [],
    }
    whole = ada.get(f"sessions/{session}?access_scope=accessible").json
    assert whole == ada.get(f"sessions/{session}").json
    assert set(whole["training_run_ids"]) == {run, private}
    assert bob.get(f"sessions/{session}?access_scope=everything").status == 400
    assert ada.call("DELETE", publish).status == 200
    assert seen("accessible") == (False, 404)


def test_integers_above_64_bits_are_rejected(ada: Client) -> None:
    rejected = ada.get(f"sessions?offset={2**70}")
    assert rejected.status == 400
    assert "64 bits" in rejected.detail


@pytest.mark.parametrize("depth", [100, 500, 900, 5000, 50_000])
def test_deeply_nested_json_is_rejected(depth: int, ada: Client) -> None:
    nested = b'{"user_metadata": {"a": ' + b"[" * depth + b"]" * depth + b"}%s}"
    session = ada.session()
    run = ada.create(session)
    bodies = {
        "create_session": nested % b"",
        "create_model": nested
        % b', "session_id": "%s", "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 2}'
        % session.encode(),
        "save_weights": nested % b', "model_id": "%s", "seq_id": 1, "path": "deep"' % run.encode(),
    }
    for name, body in bodies.items():
        rejected = ada.post(name, body)
        assert rejected.status == (400 if depth < 4096 else 413), name
        assert f"the body of {name} " in rejected.detail
    for path in (f"sessions/{session}", "sessions", "training_runs", f"training_runs/{run}/checkpoints"):
        assert ada.get(path).status == 200
    step = ada.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}})
    assert "metrics" in ada.result(step).json


def test_moderately_nested_json_is_stored(ada: Client) -> None:
    kept = {"list": [[[{"a": [{}] * 200}]]], "text": "[{" * 200}
    session = ada.post("create_session", {"user_metadata": kept}).json["session_id"]
    found = ada.get(f"sessions/{session}").json["user_metadata"]
    assert {"list": json.loads(found["list"]), "text": found["text"]} == kept


@pytest.mark.parametrize(
    "field",
    [{"user_metadata": {"note": "x" * 65_536}}, {"tags": ["x" * 100] * 700}, {"display_name": "x" * 5000}],
)
def test_metadata_above_the_limit_is_rejected_with_the_limit(ada: Client, field: dict[str, object]) -> None:
    answer = ada.post("create_session", field)
    assert answer.status == 413
    (name,) = field
    assert name in answer.detail
    assert "at most" in answer.detail


def test_metadata_of_a_run_has_the_same_limit(ada: Client) -> None:
    request = {
        "session_id": ada.session(),
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 4},
    }
    rejected = ada.post("create_model", {**request, "user_metadata": {"note": "x" * 65_536}})
    assert rejected.status == 413
    assert "65536" in rejected.detail
    assert (
        ada.result(ada.post("create_model", {**request, "user_metadata": {"note": "x" * 60_000}})).status
        == 200
    )


@pytest.mark.slow
def test_a_page_of_a_search_is_bounded_in_bytes_and_older_sessions_stay_readable(
    tmp_path: Path, tiny_model: Path
) -> None:
    opened = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}))
    client = Client(build_app(opened), opened.api_key)
    sizes = [10, 4_000_000, 10, *[60_000] * 40, 3_000_000, 10]
    for number, size in enumerate(sizes):
        metadata = {"note": "x" * size}  # as earlier versions stored them
        created_at = 1000.0 + number
        opened.store.sessions.add(SessionRow(f"s{number}", LOCAL_USER, created_at, created_at, (), metadata))
    try:
        found: list[str] = []
        cursor: dict[str, object] | None = None
        pages = 0
        while pages == 0 or cursor is not None:
            answer = client.post("sessions/search", {"limit": 200} | ({"cursor": cursor} if cursor else {}))
            page, cursor = answer.json["sessions"], answer.json.get("next_cursor")
            assert len(answer.body) <= 1024 * 1024 + 10_000 or len(page) == 1
            found += [session["session_id"] for session in page]
            pages += 1
        assert found == [f"s{number}" for number in reversed(range(len(sizes)))]
        assert client.get("sessions/s1").json["user_metadata"] == {"note": "x" * 4_000_000}
        assert len(client.get("sessions?limit=1000").json["sessions"]) == len(sizes)
    finally:
        opened.close()


def test_telemetry_of_too_many_events_is_rejected(ada: Client) -> None:
    answer = ada.post("telemetry", {"events": [1] * 1001})
    assert answer.status == 413
    assert "1000" in answer.detail
