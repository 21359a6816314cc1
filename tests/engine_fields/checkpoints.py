"""Proofs for saving, loading, expiring and copying weights."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tests.engine_fields.rig import MODEL, OTHER_MODEL, Rig, Run, assert_rejected
from tests.engine_fields.table import proves


def expiry(run: Run) -> float | None:
    """The time to live of a run's last checkpoint, in seconds."""
    shown = run.checkpoints()[-1]
    if shown.get("expires_at") is None:
        return None
    return (
        datetime.fromisoformat(shown["expires_at"]) - datetime.fromisoformat(shown["time"])
    ).total_seconds()


@proves("SaveWeightsRequest.model_id", "SaveWeightsRequest.seq_id")
def save_turn(rig: Rig) -> None:
    run = rig.run()
    assert_rejected(run.submit("save_weights", path="x", model_id="nobody"), "nobody", 404)
    ids = {run.submit("save_weights", path="x", seq_id=1).json["request_id"] for _ in range(2)}
    assert len(ids) == 1
    assert_rejected(run.submit("save_weights", path="y", seq_id=1), "1")


@proves("SaveWeightsRequest.path")
def save_path(rig: Rig) -> None:
    run = rig.run()
    assert run.save("mine") == f"tinker://{run.run_id}/weights/mine"
    assert_rejected(run.submit("save_weights", path="../x"), "../x")
    assert_rejected(run.submit("save_weights"), "path")


@proves("SaveWeightsRequest.ttl_seconds")
def save_ttl(rig: Rig) -> None:
    run = rig.run()
    run.save("for-good")
    assert expiry(run) is None
    run.save("for-an-hour", ttl_seconds=3600)
    assert expiry(run) == pytest.approx(3600)
    assert_rejected(run.submit("save_weights", path="x", ttl_seconds=0), "ttl_seconds")


@proves("SaveWeightsRequest.overwrite")
def save_overwrite(rig: Rig) -> None:
    run = rig.run()
    run.save("x")
    assert_rejected(run.submit("save_weights", path="x"), "exists already")
    assert run.save("x", overwrite=True).endswith("/x")


@proves("SaveWeightsRequest.user_metadata")
def save_user_metadata(rig: Rig) -> None:
    run = rig.run()
    run.save(user_metadata={"step": "3"})
    assert run.checkpoints()[-1]["user_metadata"] == {"step": "3"}


@proves("SaveWeightsForSamplerRequest.model_id", "SaveWeightsForSamplerRequest.seq_id")
def save_for_sampler_turn(rig: Rig) -> None:
    run = rig.run()
    assert_rejected(run.submit("save_weights_for_sampler", path="x", model_id="nobody"), "nobody", 404)
    ids = {run.submit("save_weights_for_sampler", path="x", seq_id=1).json["request_id"] for _ in range(2)}
    assert len(ids) == 1


@proves("SaveWeightsForSamplerRequest.path", "SaveWeightsForSamplerRequest.sampling_session_seq_id")
def save_for_sampler_name(rig: Rig) -> None:
    run = rig.run()
    named = rig.ada.result(run.submit("save_weights_for_sampler", path="x")).json
    assert named["path"] == f"tinker://{run.run_id}/sampler_weights/x"
    unnamed = rig.ada.result(run.submit("save_weights_for_sampler", sampling_session_seq_id=9)).json
    assert unnamed["sampling_session_id"].endswith(":sample:9")
    assert_rejected(run.submit("save_weights_for_sampler"), "sampling_session_seq_id")


@proves("SaveWeightsForSamplerRequest.kind")
def save_for_sampler_kind(rig: Rig) -> None:
    run = rig.run()

    def save(number: int, **changes: Any) -> str:
        saved = rig.ada.result(
            run.submit("save_weights_for_sampler", sampling_session_seq_id=number, **changes)
        )
        return str(saved.json["sampling_session_id"])

    def weights(sampler: str) -> str | None:
        row = rig.engine.store.samplers.get(sampler)
        assert row is not None
        return row.directory

    fixed, shared = save(1, kind="snapshot"), save(2, kind="inflight")
    before = weights(fixed)
    run.train(1)
    newest = save(3, kind="inflight")
    assert weights(fixed) == before
    assert weights(shared) == weights(newest) != before
    assert_rejected(run.submit("save_weights_for_sampler", path="x", kind="inflight"), "inflight")
    assert_rejected(run.submit("save_weights_for_sampler", path="x", kind="borrowed"), "kind")


@proves("SaveWeightsForSamplerRequest.ttl_seconds", "SaveWeightsForSamplerRequest.user_metadata")
def save_for_sampler_ttl(rig: Rig) -> None:
    run = rig.run()
    request = {"path": "x", "ttl_seconds": 3600, "user_metadata": {"step": "3"}}
    rig.ada.result(run.submit("save_weights_for_sampler", **request))
    assert expiry(run) == pytest.approx(3600)
    assert run.checkpoints()[-1]["user_metadata"] == {"step": "3"}


@proves("SaveWeightsExternalRequest.model_id", "SaveWeightsExternalRequest.seq_id")
def save_external_turn(rig: Rig) -> None:
    run = rig.run()
    assert_rejected(run.submit("save_weights_external", path="x", model_id="nobody"), "nobody", 404)
    ids = {run.submit("save_weights_external", path="x", seq_id=1).json["request_id"] for _ in range(2)}
    assert len(ids) == 1


@proves("SaveWeightsExternalRequest.path", "SaveWeightsExternalRequest.ttl_seconds")
def save_external_path(rig: Rig) -> None:
    run = rig.run()
    saved = rig.ada.result(run.submit("save_weights_external", path="x", ttl_seconds=7200)).json
    assert saved["path"] == f"tinker://{run.run_id}/external_weights/x"
    assert expiry(run) == pytest.approx(7200)


@proves("SaveWeightsExternalRequest.age_encryption_recipients")
def save_external_recipients(rig: Rig) -> None:
    run = rig.run()
    answer = run.submit("save_weights_external", path="x", age_encryption_recipients=["nobody"])
    assert_rejected(answer, "recipient", 400, 501)


def load(run: Run, path: str, **changes: Any) -> Any:
    return run.client.result(run.submit("load_weights", path=path, **changes)).json


@proves("LoadWeightsRequest.model_id", "LoadWeightsRequest.seq_id", "LoadWeightsRequest.path")
def load_path(rig: Rig) -> None:
    trained, fresh = rig.run(), rig.run()
    trained.train()
    path = trained.save()
    assert_rejected(fresh.submit("load_weights", path=path, model_id="nobody"), "nobody", 404)
    assert_rejected(
        fresh.submit("load_weights", path="tinker://nobody/weights/x"), "tinker://nobody/weights/x", 404
    )
    before = fresh.loss()
    number = fresh.number + 1
    ids = {fresh.submit("load_weights", path=path, seq_id=number).json["request_id"] for _ in range(2)}
    assert len(ids) == 1
    assert fresh.loss() == trained.loss() != before


@proves("LoadWeightsRequest.optimizer")
def load_optimizer(rig: Rig) -> None:
    source = rig.run()
    source.train()
    path = source.save()
    losses = []
    for optimizer in (True, False):
        run = rig.run()
        load(run, path, optimizer=optimizer)
        losses.append(run.train(1))
    assert losses[0] == source.train(1) != losses[1]


@proves(
    "LoadWeightsRequest.session_id", "LoadWeightsRequest.model_seq_id", "LoadWeightsRequest.user_metadata"
)
def load_into_a_new_run(rig: Rig) -> None:
    path = rig.run(rank=3).save()
    session = rig.ada.session()
    request = {"session_id": session, "model_seq_id": 6, "path": path, "user_metadata": {"a": "b"}}
    rig.ada.result(rig.ada.post("load_weights", request))
    shown = rig.ada.get(f"training_runs/{session}:train:6").json
    assert (shown["lora_rank"], shown["user_metadata"]) == (3, {"a": "b"})
    assert_rejected(rig.ada.post("load_weights", {**request, "session_id": "nowhere"}), "nowhere", 404)


@proves("LoadWeightsRequest.base_model", "LoadWeightsRequest.optimizer_config")
def load_on_another_base(rig: Rig) -> None:
    request = {"session_id": rig.ada.session(), "model_seq_id": 0, "path": rig.run().save()}
    assert_rejected(rig.ada.post("load_weights", {**request, "base_model": OTHER_MODEL}), "trained on")
    dimuon = {"type": "dimuon", "version": 1}
    assert_rejected(rig.ada.post("load_weights", {**request, "optimizer_config": dimuon}), "dimuon", 400, 501)
    assert rig.ada.post("load_weights", {**request, "base_model": MODEL}).status == 200


@proves("LoadWeightsRequest.weights_access_token")
def load_with_a_token(rig: Rig) -> None:
    path = rig.run().save()
    mine = Run(rig.bob, rig.bob.create())
    assert_rejected(mine.submit("load_weights", path=path), path, 404)
    answer = mine.submit("load_weights", path=path, weights_access_token="tml-unknown")
    assert_rejected(answer, "weights_access_token", 400, 403, 501)


@proves("WeightsInfoRequest.tinker_path")
def weights_info(rig: Rig) -> None:
    assert_rejected(
        rig.ada.post("weights_info", {"tinker_path": "tinker://no/weights/x"}), "tinker://no/weights/x", 404
    )
    assert rig.ada.post("weights_info", {"tinker_path": rig.run(rank=3).save()}).json["lora_rank"] == 3


@proves("SetCheckpointTTLRequest.ttl_seconds")
def set_ttl(rig: Rig) -> None:
    run = rig.run()
    run.save("x")
    url = f"/api/v1/training_runs/{run.run_id}/checkpoints/weights/x/ttl"
    assert rig.ada.call("PUT", url, {"ttl_seconds": 500}).status < 300
    kept = expiry(run)
    assert kept is not None
    assert kept >= 500
    assert rig.ada.call("PUT", url, {"ttl_seconds": None}).status < 300
    assert expiry(run) is None


def copied(rig: Rig, **changes: Any) -> Any:
    request = {"source_path": rig.run(rank=3).save(), "destination_project_id": "here", **changes}
    return rig.ada.post("copy_weights", request)


@proves("CopyWeightsRequest.source_path")
def copy_source(rig: Rig) -> None:
    assert_rejected(copied(rig, source_path="tinker://no/weights/x"), "tinker://no/weights/x", 404)
    path = copied(rig).json["tinker_path"]
    assert rig.ada.post("weights_info", {"tinker_path": path}).json["lora_rank"] == 3


@proves("CopyWeightsRequest.ttl_seconds")
def copy_ttl(rig: Rig) -> None:
    path = copied(rig, ttl_seconds=3600).json["tinker_path"]
    copy = Run(rig.ada, path.removeprefix("tinker://").partition("/")[0])
    assert expiry(copy) == pytest.approx(3600)


@proves("CopyWeightsRequest.destination_project_id")
def copy_project(rig: Rig) -> None:
    path = copied(rig, destination_project_id="shelf").json["tinker_path"]
    listed = rig.ada.get("training_runs?project_id=shelf").json["training_runs"]
    assert [f"{run['training_run_id']}" for run in listed] == [
        path.removeprefix("tinker://").partition("/")[0]
    ]


@proves("CopyWeightsRequest.session_id", "CopyWeightsRequest.model_seq_id")
def copy_place(rig: Rig) -> None:
    session = rig.ada.session()
    path = copied(rig, session_id=session, model_seq_id=4).json["tinker_path"]
    assert path.startswith(f"tinker://{session}:train:4/")
    assert_rejected(copied(rig, session_id="nowhere", model_seq_id=4), "nowhere", 404)


@proves("CopyWeightsRequest.weights_access_token")
def copy_with_a_token(rig: Rig) -> None:
    assert_rejected(copied(rig, weights_access_token="tml-unknown"), "weights_access_token", 400, 403)


def found(rig: Rig, **query: Any) -> list[str]:
    """The paths that a search returns."""
    answer = rig.ada.post("checkpoints/search", query)
    assert answer.status == 200, answer.body
    return [each["tinker_path"] for each in answer.json["checkpoints"]]


@proves(
    "CheckpointSearchRequest.project_ids",
    "CheckpointSearchRequest.user_metadata",
    "CheckpointSearchRequest.checkpoint_type",
    "CheckpointSearchRequest.base_models",
)
def search_filters(rig: Rig) -> None:
    session = rig.ada.post("create_session", {"project_id": "searched"}).json["session_id"]
    run = Run(rig.ada, rig.ada.create(session))
    path = run.save("labelled", user_metadata={"stage": "searched"})
    other = rig.run().save("plain")
    assert {path, other} <= set(found(rig, limit=200))
    assert found(rig, project_ids=["searched"]) == [path]
    assert found(rig, user_metadata={"stage": "searched"}) == [path]
    assert path not in found(rig, checkpoint_type="sampler", limit=200)
    assert path in found(rig, base_models=[MODEL], limit=200)
    assert path not in found(rig, base_models=[OTHER_MODEL], limit=200)


@proves("CheckpointSearchRequest.owner")
def search_owner(rig: Rig) -> None:
    path = rig.run().save("mine")
    assert path in found(rig, owner={"type": "own"}, limit=200)
    answer = rig.bob.post("checkpoints/search", {"owner": {"type": "own"}, "limit": 200})
    assert path not in [each["tinker_path"] for each in answer.json["checkpoints"]]


@proves(
    "CheckpointSearchRequest.limit",
    "CheckpointSearchRequest.cursor",
    "CheckpointSearchCursor.last_created_at",
    "CheckpointSearchCursor.last_checkpoint_uuid",
)
def search_pages(rig: Rig) -> None:
    run = rig.run()
    newest = [run.save(name) for name in ("first", "second")][::-1]
    query: dict[str, Any] = {"limit": 1}
    for path in newest:
        page = rig.ada.post("checkpoints/search", query).json
        assert [each["tinker_path"] for each in page["checkpoints"]] == [path]
        query["cursor"] = page["next_cursor"]
    for name in ("last_created_at", "last_checkpoint_uuid"):
        changed = {**query, "cursor": {**query["cursor"], name: "x"}}
        assert rig.ada.post("checkpoints/search", changed).status == 400


def started_upload(rig: Rig, **changes: Any) -> Any:
    return rig.ada.post(
        "external_weights_upload_start", {"base_model": MODEL, "lora_config": {"rank": 4}, **changes}
    )


@proves(
    "ExternalWeightsUploadStartRequest.base_model",
    "ExternalWeightsUploadStartRequest.lora_config",
    "ExternalWeightsUploadStartRequest.destination_project_id",
)
def upload_start(rig: Rig) -> None:
    assert started_upload(rig, destination_project_id="here").status == 200
    assert_rejected(started_upload(rig, base_model="unknown"), "unknown", 404)
    assert_rejected(started_upload(rig, lora_config={"rank": 0}), "rank")
    assert_rejected(started_upload(rig, destination_project_id="x" * 10_000), "destination_project_id", 413)


@proves("ExternalWeightsUploadFinishRequest.upload_id", "ExternalWeightsUploadCancelRequest.upload_id")
def upload_end(rig: Rig) -> None:
    upload_id = started_upload(rig).json["upload_id"]
    for name in ("finish", "cancel"):
        assert rig.ada.post(f"external_weights_upload_{name}", {"upload_id": "unknown"}).status == 404
        assert rig.bob.post(f"external_weights_upload_{name}", {"upload_id": upload_id}).status == 404
    unfinished = rig.ada.post("external_weights_upload_finish", {"upload_id": upload_id})
    assert unfinished.status == 400, unfinished.body
    assert rig.ada.post("external_weights_upload_cancel", {"upload_id": upload_id}).status == 200
