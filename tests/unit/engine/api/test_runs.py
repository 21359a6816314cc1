from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.embedded import open_embedded
from tinkex.engine.engine import Engine
from tinkex.errors import SetupError
from tinkex.types import TrainingRun


def save(client: Client, run: str, seq_id: int, name: str, kind: str = "save_weights", **more: object) -> str:
    request = {"model_id": run, "path": name, "seq_id": seq_id, "type": kind, **more}
    path: str = client.result(client.post(kind, request)).json["path"]
    return path


def test_a_run_is_listed_with_its_last_checkpoints(ada: Client, bob: Client) -> None:
    run = ada.create()
    save(ada, run, 1, "0001")
    last = save(ada, run, 2, "0002", ttl_seconds=3600, user_metadata={"step": 2})
    sampler = save(ada, run, 3, "0002", "save_weights_for_sampler")
    got = ada.get(f"training_runs/{run}?access_scope=owned")
    parsed = TrainingRun.model_validate(got.json)
    assert (parsed.training_run_id, parsed.base_model, parsed.is_lora, parsed.lora_rank) == (
        run,
        "tiny",
        True,
        4,
    )
    assert parsed.user_metadata == {"who": "me"}
    assert parsed.corrupted is False
    assert parsed.last_checkpoint is not None
    assert parsed.last_checkpoint.tinker_path == last
    assert parsed.last_checkpoint.user_metadata == {"step": "2"}, "official clients read only text"
    assert parsed.last_checkpoint.expires_at is not None
    assert parsed.last_sampler_checkpoint is not None
    assert parsed.last_sampler_checkpoint.tinker_path == sampler
    assert got.json["last_request_time"].endswith("Z")
    assert bob.get(f"training_runs/{run}").status == 404


def test_listings_come_in_pages_with_a_total(ada: Client) -> None:
    session = ada.session()
    runs = [ada.create(session, n) for n in range(3)]
    page = ada.get("training_runs?limit=2&offset=0&access_scope=owned").json
    assert len(page["training_runs"]) == 2
    assert page["cursor"]["total_count"] >= 3
    for n, run in enumerate(runs):
        save(ada, run, 1, f"c{n}")
    listed = ada.get("checkpoints?limit=1&offset=1").json
    assert [c["checkpoint_id"] for c in listed["checkpoints"]] == ["weights/c1"]
    assert listed["cursor"]["limit"] == 1
    assert ada.get("checkpoints?limit=100000").status == 400


def test_runs_are_listed_by_project(ada: Client) -> None:
    session = ada.post("create_session", {"project_id": "p1"}).json["session_id"]
    run = ada.create(session)
    listed = ada.get("training_runs?project_id=p1").json
    assert [r["training_run_id"] for r in listed["training_runs"]] == [run]
    assert listed["cursor"] == {"offset": 0, "limit": 20, "total_count": 1}
    assert ada.get("training_runs?project_id=none").json["training_runs"] == []


def test_checkpoints_of_a_run_are_listed_and_deleted(ada: Client, bob: Client, engine: Engine) -> None:
    run = ada.create()
    path = save(ada, run, 1, "a")
    save(ada, run, 2, "b", "save_weights_for_sampler")
    listed = ada.get(f"training_runs/{run}/checkpoints").json["checkpoints"]
    assert [(c["checkpoint_id"], c["checkpoint_type"]) for c in listed] == [
        ("weights/a", "training"),
        ("sampler_weights/b", "sampler"),
    ]
    assert all(c["size_bytes"] > 1000 for c in listed)
    (row, _) = engine.store.checkpoints.of_run(run, 0.0)
    assert bob.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/a").status == 404
    engine.store.checkpoints.set_public(row, public=True)
    assert bob.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/a").status == 403
    assert bob.post("weights_info", {"tinker_path": path}).status == 200
    assert ada.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/a").status == 200
    assert ada.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/a").status == 404
    assert len(ada.get(f"training_runs/{run}/checkpoints").json["checkpoints"]) == 1
    assert ada.post("weights_info", {"tinker_path": path}).status == 404


def test_an_embedded_engine_is_shared_within_a_process(tiny_model: Path, tmp_path: Path) -> None:
    first = open_embedded(tmp_path, {"tiny": str(tiny_model)})
    second = open_embedded(tmp_path, {"also": str(tiny_model)})
    try:
        assert first is second
        client = Client(first.app)
        names = [m["model_name"] for m in client.get("get_server_capabilities").json["supported_models"]]
        assert names == ["tiny", "also"]
        assert client.create()
        first.close()
        assert client.create()
        with pytest.raises(SetupError, match="another name"):
            open_embedded(tmp_path, {"tiny": "elsewhere"})
    finally:
        second.close()
    third = open_embedded(tmp_path, {"tiny": str(tiny_model)})
    assert third is not first
    third.close()


def test_an_embedded_engine_serves_any_model_directory(tiny_model: Path, tmp_path: Path) -> None:
    embedded = open_embedded(tmp_path)
    try:
        client = Client(embedded.app, embedded.api_key)
        request = {
            "session_id": client.session(),
            "model_seq_id": 0,
            "base_model": str(tiny_model),
            "lora_config": {"rank": 2},
        }
        assert client.result(client.post("create_model", request)).json["model_id"]
    finally:
        embedded.close()


def test_invalid_samples_are_rejected_before_the_model_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    embedded = open_embedded(tmp_path, {"tiny": str(tiny_model)})
    try:
        client = Client(embedded.app)
        request = {"base_model": "tiny", "prompt": {"chunks": []}, "sampling_params": {"max_tokens": 1}}
        assert not embedded.engine.models.find("tiny").known
        answer = client.post("asample", request)
        assert answer.status == 400
        assert "prompt is empty" in answer.detail
    finally:
        embedded.close()


def test_only_the_owner_publishes_and_unpublishes_a_checkpoint(ada: Client, bob: Client) -> None:
    run = ada.create()
    path = save(ada, run, 1, "shared")
    address = f"/api/v1/training_runs/{run}/checkpoints/weights/shared"
    body = {"tinker_path": path}
    assert bob.call("POST", f"{address}/publish").status == 404
    for _ in range(2):
        assert ada.call("POST", f"{address}/publish").status == 200
    assert ada.get(f"training_runs/{run}/checkpoints").json["checkpoints"][0]["public"] is True
    assert bob.post("weights_info", body).status == 200
    assert bob.call("DELETE", f"{address}/publish").status == 403
    for _ in range(2):
        assert ada.call("DELETE", f"{address}/publish").status == 200
    assert bob.post("weights_info", body).status == 404
    assert ada.post("weights_info", body).status == 200, "unpublishing deletes nothing"


def test_the_expiry_of_a_checkpoint_can_be_changed(ada: Client) -> None:
    run = ada.create()
    save(ada, run, 1, "kept")
    address = f"/api/v1/training_runs/{run}/checkpoints/weights/kept/ttl"

    def expires() -> object:
        return ada.get(f"training_runs/{run}/checkpoints").json["checkpoints"][0].get("expires_at")

    assert expires() is None
    assert ada.call("PUT", address, b'{"ttl_seconds": 3600}').status == 200
    assert str(expires()).endswith("Z")
    assert ada.call("PUT", address, b'{"ttl_seconds": null}').status == 200
    assert expires() is None
    assert ada.call("PUT", address, b'{"ttl_seconds": 0}').status == 400
    for no_calendar in (10**12, 10**29):
        assert ada.call("PUT", address, json.dumps({"ttl_seconds": no_calendar}).encode()).status == 400
        request = {"model_id": run, "path": "x", "seq_id": 2, "ttl_seconds": no_calendar}
        assert ada.post("save_weights", request).status == 400
    assert expires() is None


def test_sessions_are_found_by_name_metadata_project_and_status(ada: Client, bob: Client) -> None:
    def opened(name: str, **more: object) -> str:
        made: str = ada.post("create_session", {"display_name": name, **more}).json["session_id"]
        return made

    def found(**question: object) -> list[str]:
        answer = ada.post("sessions/search", question)
        assert answer.status == 200, answer.json
        return [session["session_id"] for session in answer.json["sessions"]]

    night = opened("Nightly sweep 1", user_metadata={"team": "a"}, project_id="p7")
    other = opened("nightly sweep 2", user_metadata={"team": "b"})
    run = ada.create(night)
    save(ada, run, 1, "one")
    ada.post(f"sessions/{other}/finish", {"reason": {"type": "errored"}, "detail": "boom"})

    assert found(display_name="NIGHTLY") == [other, night]
    assert found(user_metadata={"team": "a"}) == [night]
    assert found(project_ids=["p7"]) == [night]
    assert found(session_id=other) == [other]
    assert night in found(statuses=[{"type": "active"}])
    assert found(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == [other]
    assert found(statuses=[{"type": "failed"}]) == []
    assert found(owner={"type": "user", "owner_urns": ["somebody"]}) == []
    assert bob.post("sessions/search", {"session_id": night}).json["sessions"] == []
    assert ada.post("sessions/search", {"limit": 0}).status == 400

    first = ada.post("sessions/search", {"display_name": "nightly", "limit": 1}).json
    assert first["sessions"][0]["status"] == {
        "type": "client_finished",
        "reason": {"type": "errored"},
        "detail": "boom",
    }
    second = ada.post(
        "sessions/search", {"display_name": "nightly", "limit": 1, "cursor": first["next_cursor"]}
    ).json
    assert [s["session_id"] for s in second["sessions"]] == [night]
    assert second["sessions"][0]["checkpoints_count"] == 1
    assert "next_cursor" not in second


def test_storage_is_counted_by_project(ada: Client, bob: Client) -> None:
    session = ada.post("create_session", {"project_id": "counted"}).json["session_id"]
    run = ada.create(session)
    save(ada, run, 1, "a")
    save(ada, run, 2, "b", "save_weights_for_sampler")
    listed = ada.get(f"training_runs/{run}/checkpoints").json["checkpoints"]
    (item,) = ada.get("billing/usage/checkpoints/current?project_id=counted").json["data"]
    size = sum(checkpoint["size_bytes"] for checkpoint in listed)
    assert (item["checkpoint_count"], item["size_bytes"], item["size_gigabytes"]) == (2, size, size / 1e9)
    assert "estimated_monthly_cost_usd" not in item
    save(ada, ada.create(), 1, "elsewhere")
    everything = ada.get("billing/usage/checkpoints/current").json["data"]
    assert {"counted", None} <= {entry.get("project_id") for entry in everything}
    assert bob.get("billing/usage/checkpoints/current?project_id=counted").json["data"] == []


def test_search_finds_sessions_with_published_checkpoints_and_reveals_nothing_else(
    ada: Client, bob: Client
) -> None:
    about = {"display_name": "secret sweep", "user_metadata": {"team": "secret"}, "project_id": "p-secret"}
    session = ada.post("create_session", about).json["session_id"]
    run = ada.create(session)
    save(ada, run, 1, "hidden")
    save(ada, run, 2, "shared")

    def found(client: Client, **question: object) -> list[dict[str, object]]:
        body = {"session_id": session, "owner": {"type": "accessible"}, **question}
        sessions: list[dict[str, object]] = client.post("sessions/search", body).json["sessions"]
        return sessions

    assert found(bob) == []
    assert len(found(ada)) == 1
    ada.call("POST", f"/api/v1/training_runs/{run}/checkpoints/weights/shared/publish")
    (seen,) = found(bob)
    assert seen["owner"] == "local"
    assert seen["checkpoints_count"] == 1
    assert not {"display_name", "user_metadata", "status"} & seen.keys()
    assert seen["project_id"] == ""
    assert found(bob, owner={"type": "own"}) == []
    assert len(found(bob, owner={"type": "user", "owner_urns": ["local"]})) == 1
    assert found(bob, owner={"type": "user", "owner_urns": ["bob"]}) == []
    for guess in (
        {"display_name": "secret"},
        {"user_metadata": {"team": "secret"}},
        {"project_ids": ["p-secret"]},
        {"statuses": [{"type": "active"}]},
    ):
        assert len(found(ada, **guess)) == 1
        assert found(bob, **guess) == []
