from __future__ import annotations

import pytest

from tests.unit.engine.api.asgi import Client


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
    assert model == {"model_name": "tiny", "max_context_length": 512, "trainable": True, "sampleable": True}


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
        "user_metadata": {"a": 1},
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
        assert rejected.status == 400, name
        assert f"the body of {name} is invalid" in rejected.detail
    for path in (f"sessions/{session}", "sessions", "training_runs", f"training_runs/{run}/checkpoints"):
        assert ada.get(path).status == 200
    step = ada.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}})
    assert "metrics" in ada.result(step).json


def test_moderately_nested_json_is_stored(ada: Client) -> None:
    kept = {"list": [[[{"a": [{}] * 200}]]], "text": "[{" * 200}
    session = ada.post("create_session", {"user_metadata": kept}).json["session_id"]
    assert ada.get(f"sessions/{session}").json["user_metadata"] == kept
