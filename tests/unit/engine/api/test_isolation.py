"""Every endpoint, called by the wrong user with the ids of another user's objects."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.api.asgi import PROTO, Answer, Client
from tests.unit.engine.api.test_assets import PNG, upload
from tests.unit.engine.api.test_custom_losses import custom_pass, definition
from tests.unit.engine.api.test_downloads import export, save
from tests.unit.engine.api.test_sampling import request, sampler
from tests.unit.engine.api.test_training import optim_step, pass_body
from tinkex._wire.endpoints import ENDPOINTS, endpoint
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.store import open_users


@dataclass(frozen=True)
class Objects:
    """Ada's objects."""

    session: str
    run: str
    sampler: str
    request_id: str
    path: str
    external: str
    loss: str
    asset: str
    upload: str

    @property
    def ids(self) -> list[str]:
        return [self.session, self.run, self.sampler, self.request_id, self.path, self.asset, self.upload]


@pytest.fixture(scope="module")
def objects(engine: Engine) -> Objects:
    ada = Client(build_app(engine), engine.api_key)
    session = ada.session()
    run = ada.create(session)
    path, external = save(ada, run, 1, "mine"), export(ada, run, 2, "mine").json["path"]
    sampler_id = sampler(ada, session)
    submitted = ada.post("asample", request(sampler_id))
    ada.result(submitted)
    loss = ada.result(ada.post("create_custom_loss", definition(session))).json["loss_id"]
    asset = upload(ada, [("secret.png", PNG + b"of Ada alone")]).json["assets"][0]["asset_id"]
    started = {"base_model": "tiny", "lora_config": {"rank": 2}}
    uploaded = ada.post("external_weights_upload_start", started).json["upload_id"]
    request_id = submitted.json["request_id"]
    return Objects(session, run, sampler_id, request_id, path, external, loss, asset, uploaded)


def bodies(objects: Objects) -> dict[str, dict[str, Any] | bytes]:
    """A body for every endpoint that takes an id; each is rejected for another user."""
    run, session, path = objects.run, objects.session, objects.path
    return {
        "session_heartbeat": {"session_id": session},
        "finish_session": {"reason": {"type": "success"}},
        "assign_session_project": {"project_id": "theirs"},
        "create_model": {
            "session_id": session,
            "model_seq_id": 9,
            "base_model": "tiny",
            "lora_config": {"rank": 2},
        },
        "forward_backward": pass_body(run, 3),
        "forward": {"model_id": run, "seq_id": 3, "forward_input": {"data": [], "loss_fn": "cross_entropy"}},
        "optim_step": optim_step(run, 3),
        "save_weights": {"model_id": run, "path": "x", "seq_id": 3},
        "save_weights_for_sampler": {"model_id": run, "path": "x", "seq_id": 3},
        "save_weights_external": {"model_id": run, "path": "x", "seq_id": 3},
        "create_custom_loss": definition(session, 5),
        "load_weights": {"model_id": run, "seq_id": 3, "path": path},
        "unload_model": {"model_id": run},
        "get_info": {"model_id": run},
        "log_metrics": {"model_id": run, "step": 1, "metrics": {"reward": 1.0}},
        "log_rollouts": {"model_id": run, "step": 1, "rollouts": [{"text": "theirs"}]},
        "weights_info": {"tinker_path": path},
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": 7,
            "base_model": "tiny",
        },
        "asample": request(objects.sampler, 5),
        "stream_sample": request(objects.sampler, 6),
        "join_sampling_session": {"sampling_session_id": objects.sampler},
        "retrieve_future": {"request_id": objects.request_id},
        "cancel_future": {"request_id": objects.request_id},
        "retrieve_futures": {"target": {"sampling_session_id": objects.sampler}},
        "copy_weights": {"source_path": path, "destination_project_id": "p"},
        "set_checkpoint_ttl": {"ttl_seconds": 3600},
        "external_weights_upload_finish": {"upload_id": objects.upload},
        "external_weights_upload_cancel": {"upload_id": objects.upload},
        "upload_file": b"{}",
        "get_session": b"",
        "export_session_trace": b"",
        "get_sampler": b"",
        "get_training_run": b"",
        "get_training_run_metrics": b"",
        "list_rollouts": b"",
        "list_checkpoints": b"",
        "delete_checkpoint": b"",
        "publish_checkpoint": b"",
        "unpublish_checkpoint": b"",
        "external_weights_urls": b"",
        "checkpoint_archive": b"",
        "download": b"",
        "get_asset": b"",
        "delete_asset": b"",
    }


OPEN = frozenset({"client_config", "client_dynamic_config", "healthz", "get_server_capabilities", "telemetry", "tokenizer_file"})  # fmt: skip
"""Endpoints that take no id and return nothing about a user."""

OF_THE_CALLER = frozenset(
    {
        "auth_token", "get_own_key", "create_session", "list_sessions", "search_sessions", "list_training_runs",
        "list_user_checkpoints", "audit_log", "billing_usage", "checkpoint_storage_usage", "delete_own_key", "list_assets",
        "upload_assets", "search_checkpoints", "external_weights_upload_start",
    }
)  # fmt: skip
"""Endpoints about the user who calls them."""

SIGNED = frozenset({"download", "upload_file"})
"""Endpoints whose URLs are signed, and need no key."""


def call(client: Client, name: str, objects: Objects, body: dict[str, Any] | bytes) -> Any:
    row = endpoint(name)
    checkpoint = objects.external if name == "external_weights_urls" else objects.path
    parameters = {
        "session_id": objects.session,
        "sampler_id": objects.sampler,
        "training_run_id": objects.run,
        "checkpoint_id": "/".join(checkpoint.split("/")[-2:]),
        "token": "eyJ.guess.ed",
        "file": "adapter_model.safetensors",
        "asset_id": objects.asset,
    }
    wanted = {key: value for key, value in parameters.items() if f"{{{key}" in row.path}
    headers = {"content-type": PROTO} if name == "forward_backward" else {}
    return client.call(row.method, row.url_path(wanted), body, headers)


def test_every_endpoint_is_covered(objects: Objects) -> None:
    assert set(bodies(objects)) | OPEN | OF_THE_CALLER == set(ENDPOINTS)


@pytest.mark.parametrize("name", sorted(set(ENDPOINTS) - OPEN - OF_THE_CALLER))
def test_objects_of_another_user_are_not_found(name: str, objects: Objects, bob: Client) -> None:
    answer = call(bob, name, objects, bodies(objects)[name])
    assert answer.status in ({410} if name in SIGNED else {403, 404}), answer.body


@pytest.mark.parametrize("name", sorted(set(ENDPOINTS) - {"healthz"} - SIGNED))
def test_requests_without_a_key_are_rejected(name: str, objects: Objects, engine: Engine) -> None:
    body = {**bodies(objects)}.get(name, {} if ENDPOINTS[name].method != "GET" else b"")
    assert call(Client(build_app(engine)), name, objects, body).status == 401


@pytest.mark.parametrize(
    "name", sorted(OF_THE_CALLER - {"delete_own_key", "upload_assets", "external_weights_upload_start"})
)
def test_responses_contain_only_the_users_own_objects(name: str, objects: Objects, bob: Client) -> None:
    body = {} if ENDPOINTS[name].method == "POST" else b""
    query = (
        "?starting_on=2026-01-01T00:00:00Z&ending_before=2100-01-01T00:00:00Z" if "billing" in name else ""
    )
    answer = bob.call(ENDPOINTS[name].method, ENDPOINTS[name].path + query, body)
    assert answer.status == 200, answer.body
    text = answer.body.decode()
    assert not [each for each in objects.ids if each in text]


def test_rejected_requests_change_nothing(objects: Objects, ada: Client, bob: Client) -> None:
    for name, body in bodies(objects).items():
        call(bob, name, objects, body)
    assert ada.post("session_heartbeat", {"session_id": objects.session}).status == 200
    checkpoints = ada.get(f"training_runs/{objects.run}/checkpoints").json["checkpoints"]
    assert [each["public"] for each in checkpoints] == [False, False]
    assert ada.get(f"assets/{objects.asset}").status == 200
    finished = ada.post("external_weights_upload_finish", {"upload_id": objects.upload})
    assert "has not been sent" in finished.detail
    assert ada.result(ada.post("optim_step", optim_step(objects.run, 3))).json["metrics"], (
        "no number was used up"
    )


def test_a_user_cannot_use_another_users_loss(objects: Objects, bob: Client) -> None:
    run = bob.create()
    answer = bob.post("forward_backward", custom_pass(run, 1, objects.loss), content_type=PROTO)
    assert answer.status == 404


def test_a_published_checkpoint_makes_its_run_accessible_and_no_more(ada: Client, bob: Client) -> None:
    run = ada.create()
    save(ada, run, 1, "shown")
    save(ada, run, 2, "hidden")
    publish = f"/api/v1/training_runs/{run}/checkpoints/weights/shown/publish"
    for scope, status in (("owned", 404), ("accessible", 404)):
        assert bob.get(f"training_runs/{run}?access_scope={scope}").status == status
    ada.call("POST", publish)
    assert bob.get(f"training_runs/{run}").status == 404
    seen = bob.get(f"training_runs/{run}?access_scope=accessible").json
    assert seen["last_checkpoint"]["checkpoint_id"] == "weights/shown"
    assert "user_metadata" not in seen, "metadata is visible only to the owner"
    listed = bob.get(f"training_runs/{run}/checkpoints").json["checkpoints"]
    assert [each["checkpoint_id"] for each in listed] == ["weights/shown"]
    for scope, expected in (("owned", False), ("accessible", True)):
        runs = bob.get(f"training_runs?limit=1000&access_scope={scope}").json
        assert (run in json.dumps(runs)) is expected
        assert runs["cursor"]["total_count"] == len(runs["training_runs"])
    ada.call("DELETE", publish)
    assert bob.get(f"training_runs/{run}?access_scope=accessible").status == 404
    assert bob.get("training_runs?access_scope=everything").status == 400
    assert bob.get("sessions?access_scope=everything").status == 400


@pytest.fixture
def tight(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine with small quotas."""
    config = EngineConfig(
        home=tmp_path,
        models={"tiny": str(tiny_model)},
        long_poll_s=0.25,
        max_live_runs_per_user=1,
        max_disk_bytes_per_user=80_000,  # one checkpoint
        max_pending_operations=3,
    )
    engine = Engine(config)
    engine.store.users.add_key("bob", "tml-bob", 0.0)
    engine.start()
    yield engine
    engine.close()


def test_quotas_are_enforced_with_a_clear_error(tight: Engine) -> None:
    ada, bob = (Client(build_app(tight), key) for key in (tight.api_key, "tml-bob"))
    session = ada.session()
    run = ada.create(session)
    more = {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 2}}
    rejected = ada.post("create_model", more)
    assert (rejected.status, rejected.headers["retry-after"]) == (429, "5")
    assert rejected.json["queue_state"] == "paused_rate_limit"
    assert "unload" in rejected.detail
    assert bob.create(), "quotas are per user"
    path = save(ada, run, 1)
    again = {"model_id": run, "path": "second", "seq_id": 2, "type": "save_weights"}
    assert ada.post("save_weights", again).status == 429
    assert ada.post("copy_weights", {"source_path": path, "destination_project_id": "p"}).status == 429
    ada.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/kept")
    assert ada.result(ada.post("save_weights", again)).json["path"], "its seq_id was not used"
    parked = [ada.post("optim_step", optim_step(run, 10 + n)).status for n in range(5)]
    assert parked == [200, 200, 200, 429, 429]
    assert bob.post("create_session", {}).status == 200


def call_concurrently(calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Makes all calls simultaneously; returns their responses."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def test_quotas_hold_for_concurrent_requests(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"models": {"tiny": str(tiny_model)}, "long_poll_s": 0.25}
    engine = Engine(
        EngineConfig(home=tmp_path, max_live_runs_per_user=2, max_disk_bytes_per_user=45_000, **settings)
    )
    engine.start()
    engine.load_models().result()
    try:
        app = build_app(engine)
        clients = [Client(app, engine.api_key) for _ in range(8)]
        ada, session = clients[0], clients[0].session()
        paused = contextlib.ExitStack()
        paused.enter_context(engine.paused())  # nothing runs before all requests have arrived

        def create(n: int) -> Answer:
            lora = {"rank": 2, "seed": 1}
            body = {"session_id": session, "model_seq_id": n, "base_model": "tiny", "lora_config": lora}
            return clients[n].post("create_model", body)

        created = call_concurrently([partial(create, n) for n in range(8)])
        assert sorted(answer.status for answer in created) == [200] * 2 + [429] * 6
        for answer in created:
            assert answer.status == 200 or answer.json["queue_state"] == "paused_rate_limit"
        runs = [answer.json["model_id"] for answer in created if answer.status == 200]

        def save(n: int) -> Answer:
            body = {"model_id": runs[n % 2], "path": f"s{n}", "seq_id": n // 2 + 1}
            return clients[n].post("save_weights", body)

        saving = call_concurrently([partial(save, n) for n in range(8)])
        paused.close()
        saved = [ada.result(answer).json for answer in saving if answer.status == 200]
        assert len([each for each in saved if "path" in each]) == 1
        assert all("a user's quota" in each["error"] for each in saved if "path" not in each)
        (path,) = [each["path"] for each in saved if "path" in each]
        listed = ada.get("checkpoints").json["checkpoints"]
        assert [each["tinker_path"] for each in listed] == [path]
    finally:
        paused.close()
        engine.close()


@pytest.mark.slow
def test_keys_created_and_revoked_by_another_process_take_effect_immediately(engine: Engine) -> None:
    with open_users(engine.store.root) as users:
        key, row = users.create_key("dave", time.time())
        dave = Client(build_app(engine), key)
        assert dave.get("sessions").status == 200
        users.revoke(row.key_id, time.time())
        deadline = time.monotonic() + 20
        while dave.get("sessions").status == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert dave.get("sessions").status == 401


def test_the_disk_limit_of_the_server_is_enforced(tiny_model: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        home=tmp_path, models={"tiny": str(tiny_model)}, max_disk_bytes=80_000, long_poll_s=0.25
    )
    engine = Engine(config)
    engine.store.users.add_key("bob", "tml-bob", 0.0)
    engine.start()
    try:
        ada, bob = (Client(build_app(engine), key) for key in (engine.api_key, "tml-bob"))
        save(ada, ada.create(), 1)
        rejected = bob.post("save_weights", {"model_id": bob.create(), "path": "x", "seq_id": 1})
        assert "of the 80000 it may use" in bob.result(rejected).json["error"], "when it is written"
        while (answer := bob.post("create_session", {"tags": ["x" * 3000]})).status == 200:
            pass
        assert (answer.status, answer.json["queue_state"]) == (429, "paused_capacity")
    finally:
        engine.close()


def test_bodies_of_small_requests_are_limited(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}))
    try:
        client = Client(build_app(engine), engine.api_key)
        assert client.post("create_session", {"user_metadata": {"x": "y" * 5_000_000}}).status == 413
        assert client.post("asample", {"x": "y" * 5_000_000}).status == 400, "prompts may be long"
    finally:
        engine.close()
