"""Searching checkpoints: filters, pages, and what of other users is found."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.unit.engine.api.asgi import Client
from tests.unit.engine.api.test_downloads import export, save
from tinkex.engine.api.app import build_app
from tinkex.engine.engine import Engine
from tinkex.engine.store import CheckpointKind, CheckpointRow
from tinkex.types import LoraConfig


def client(engine: Engine, name: str) -> Client:
    """A user with no checkpoints."""
    engine.store.users.add_key(name, f"tml-{name}", 0.0)
    return Client(build_app(engine), f"tml-{name}")


def names(client: Client, **query: Any) -> list[str]:
    answer = client.post("checkpoints/search", query)
    assert answer.status == 200, answer.body
    return [one["checkpoint_id"] for one in answer.json["checkpoints"]]


def pages(client: Client, **query: Any) -> list[list[str]]:
    found = []
    cursor = None
    while True:
        answer = client.post("checkpoints/search", {**query, "cursor": cursor}).json
        found.append([one["tinker_path"] for one in answer["checkpoints"]])
        cursor = answer.get("next_cursor")
        if cursor is None:
            return found


def publish(client: Client, path: str) -> None:
    run, rest = path.removeprefix("tinker://").split("/", 1)
    assert client.call("POST", f"/api/v1/training_runs/{run}/checkpoints/{rest}/publish").status == 200


def test_checkpoints_are_found_by_what_they_are(engine: Engine) -> None:
    ada = client(engine, "search-ada")
    session = ada.post("create_session", {"project_id": "alpha"}).json["session_id"]
    run, other = ada.create(session), ada.create()
    body = {"model_id": run, "path": "first", "seq_id": 1, "user_metadata": {"stage": "sft", "step": 3}}
    ada.result(ada.post("save_weights", body))
    ada.result(ada.post("save_weights_for_sampler", {"model_id": run, "path": "second", "seq_id": 2}))
    export(ada, other, 1, "third")
    everything = ["external_weights/third", "sampler_weights/second", "weights/first"]
    assert names(ada) == everything
    assert names(ada, project_ids=["alpha"]) == everything[1:]
    assert names(ada, project_ids=[]) == []
    assert names(ada, checkpoint_type="training") == ["weights/first"]
    assert names(ada, checkpoint_type="external") == ["external_weights/third"]
    assert names(ada, user_metadata={"stage": "sft"}) == ["weights/first"]
    assert names(ada, user_metadata={"stage": "sft", "other": "x"}) == []
    assert names(ada, user_metadata={"step": "3"}) == ["weights/first"], "values are compared as text"
    assert names(ada, user_metadata={"step": "4"}) == []
    assert names(ada, base_models=["tiny", "another"]) == everything
    assert names(ada, base_models=["another"]) == names(ada, base_models=[]) == []
    assert (
        names(ada, checkpoint_type="sampler", project_ids=["alpha"], base_models=["tiny"]) == everything[1:2]
    )


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ({"project_ids": ["of nobody"]}, 404, "no session of yours is in that project"),
        ({"base_models": ["m"] * 101}, 400, "base_models has more than 100"),
        ({"limit": 0}, 400, "1…200"),
        ({"limit": 201}, 400, "1…200"),
        ({"checkpoint_type": "merged"}, 400, "checkpoint_type"),
        ({"kind": "training"}, 400, "kind"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": "x"}}, 400, "cursor"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": "0x1p+99/a/b/c"}}, 400, "cursor"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_checkpoint_uuid": "x"}}, 400, "last_created_at"),
    ],
)  # fmt: skip
def test_a_query_that_cannot_be_honoured_is_rejected(
    ada: Client, query: dict[str, Any], status: int, words: str
) -> None:
    answer = ada.post("checkpoints/search", query)
    assert answer.status == status, answer.body
    assert words in answer.detail


def test_pages_hold_every_checkpoint_once_also_those_of_one_moment(engine: Engine) -> None:
    bea, now = client(engine, "search-bea"), time.time()
    moments = [now, now, now, now - 1e-7, now - 2e-7, now - 5e-7, now - 1, now - 1]
    for number, moment in enumerate(moments):
        engine.store.checkpoints.put(
            CheckpointRow(
                run_id=f"run-{number % 3}",
                kind=CheckpointKind.WEIGHTS,
                name=f"n{number}",
                owner="search-bea",
                base_model="tiny",
                lora=LoraConfig(rank=1),
                has_optimizer=False,
                created_at=moment,
                size_bytes=1,
                directory="nowhere",
                user_metadata={"note": "x" * 200_000} if number == 4 else None,
            )
        )
    try:
        (together,) = pages(bea)
        assert len(together) == len(moments)
        for limit in (1, 3, 8):
            found = pages(bea, limit=limit)
            assert [path for page in found for path in page] == together
            assert max(map(len, found)) <= limit
    finally:
        for row in engine.store.checkpoints.of_owner("search-bea", now, 100, 0):
            engine.store.checkpoints.delete(row)


def test_a_page_continues_after_a_checkpoint_that_was_deleted(engine: Engine) -> None:
    cleo = client(engine, "search-cleo")
    run = cleo.create()
    paths = [save(cleo, run, number, f"n{number}") for number in (1, 2, 3)]
    first = cleo.post("checkpoints/search", {"limit": 2}).json
    assert [one["tinker_path"] for one in first["checkpoints"]] == paths[:0:-1]
    cleo.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/n2")
    rest = cleo.post("checkpoints/search", {"limit": 2, "cursor": first["next_cursor"]}).json
    assert [one["tinker_path"] for one in rest["checkpoints"]] == paths[:1]


def test_of_others_only_public_checkpoints_are_found_and_not_their_projects(engine: Engine) -> None:
    dora, emil = client(engine, "search-dora"), client(engine, "search-emil")
    session = dora.post("create_session", {"project_id": "secret"}).json["session_id"]
    run = dora.create(session)
    shown, hidden = save(dora, run, 1, "shown"), save(dora, run, 2, "hidden")
    publish(dora, shown)
    own = save(emil, emil.create(), 1, "own")
    anyone, dora_s = {"type": "accessible"}, {"type": "user", "owner_urns": ["search-dora"]}

    def found(client: Client, **query: Any) -> set[str]:
        mine = {shown, hidden, own}
        return {path for page in pages(client, **query) for path in page if path in mine}

    assert found(emil) == {own}
    assert found(emil, owner=anyone) == {shown, own}
    assert found(emil, owner=dora_s) == {shown}
    assert found(dora, owner=dora_s) == {shown, hidden}
    assert found(dora, owner=anyone, project_ids=["secret"]) == {shown, hidden}
    assert emil.post("checkpoints/search", {"owner": anyone, "project_ids": ["secret"]}).status == 404
    emil.post("create_session", {"project_id": "secret"})
    assert found(emil, owner=anyone, project_ids=["secret"]) == set(), "a name of one's own reveals nothing"
    assert emil.post("checkpoints/search", {"owner": {"type": "user", "owner_urns": []}}).status == 400
