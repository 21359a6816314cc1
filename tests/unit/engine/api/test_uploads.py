"""Uploads of external weights: files that arrive whole or in parts, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.unit.engine.api.asgi import Answer, Client
from tests.unit.engine.api.test_downloads import export, fetch, urls
from tests.unit.engine.api.test_sampling import request, sampler
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA = {"rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True}


@pytest.fixture(scope="module")
def files(engine: Engine) -> Mapping[str, bytes]:
    """An export of a run of rank 4."""
    ada = Client(build_app(engine), engine.api_key)
    path = export(ada, ada.create(rank=4), 1).json["path"]
    return {name: fetch(engine, url).body for name, url in urls(ada, path).json["urls"].items()}


@dataclass(frozen=True)
class Upload:
    """An upload that was started; PUTs have no key."""

    client: Client
    upload_id: str
    urls: Mapping[str, str]

    def put(self, name: str, body: bytes, **headers: str) -> Answer:
        given = {"content-length": str(len(body)), "content-type": "application/octet-stream"}
        given |= {key.replace("_", "-"): value for key, value in headers.items()}
        path = urlsplit(self.urls[name]).path
        return Client(self.client.app).call("PUT", path, body, given)

    def finish(self) -> Answer:
        return self.client.post("external_weights_upload_finish", {"upload_id": self.upload_id})

    def cancel(self) -> Answer:
        return self.client.post("external_weights_upload_cancel", {"upload_id": self.upload_id})


def start_answer(client: Client, **more: Any) -> Answer:
    body = {"base_model": "tiny", "lora_config": LORA, **more}
    return client.post("external_weights_upload_start", body)


def start(client: Client, **more: Any) -> Upload:
    answer = start_answer(client, **more)
    assert answer.status == 200, answer.body
    assert set(answer.json["urls"]) == {CONFIG, WEIGHTS}
    return Upload(client, answer.json["upload_id"], answer.json["urls"])


def upload_all(upload: Upload, files: Mapping[str, bytes]) -> str:
    for name, content in files.items():
        assert upload.put(name, content).status == 200
    path: str = upload.finish().json["tinker_path"]
    return path


def stored(engine: Engine, owner: str = "local") -> int:
    return engine.store.disk_usage.of(owner).get("uploads", 0)


def is_gone(engine: Engine, upload: Upload) -> bool:
    """Whether nothing is left of an upload, on disk or in the database."""
    directory = engine.store.root / "uploads" / upload.upload_id
    return engine.store.uploads.get(upload.upload_id) is None and not directory.exists()


@pytest.mark.slow
def test_files_that_were_exported_become_a_checkpoint_again(
    engine: Engine, ada: Client, files: Mapping[str, bytes]
) -> None:
    answer = start_answer(ada, destination_project_id="weights-project")
    assert datetime.fromisoformat(answer.json["expires"]).timestamp() > time.time() + 3600
    upload = Upload(ada, answer.json["upload_id"], answer.json["urls"])
    path = upload_all(upload, files)
    assert upload.finish().json["tinker_path"] == path, "a repeated finish returns the same checkpoint"
    assert path.endswith(":train:0/external_weights/uploaded")
    (listed,) = [
        one for one in ada.get("checkpoints?limit=1000").json["checkpoints"] if one["tinker_path"] == path
    ]
    assert (listed["checkpoint_type"], listed["base_model"]) == ("external", "tiny")
    again = {name: fetch(engine, url).body for name, url in urls(ada, path).json["urls"].items()}
    assert again == files
    session = ada.session()
    sampled = ada.post("asample", request(sampler(ada, session, model_path=path)))
    assert ada.result(sampled).status == 200
    loaded = ada.post("load_weights", {"session_id": session, "model_seq_id": 0, "path": path})
    assert ada.result(loaded).json["model_id"] == f"{session}:train:0"
    assert not (engine.store.root / "uploads" / upload.upload_id).exists()


def test_a_part_that_arrived_is_not_sent_again(
    engine: Engine, ada: Client, files: Mapping[str, bytes]
) -> None:
    upload, content = start(ada), files[WEIGHTS]
    total, half = len(content), len(content) // 2
    query = {"content_range": f"bytes */{total}"}
    assert upload.put(WEIGHTS, b"", **query).status == 308
    sent = upload.put(WEIGHTS, content[:half], content_range=f"bytes 0-{half - 1}/{total}")
    assert (sent.status, sent.headers["range"]) == (308, f"bytes=0-{half - 1}")
    assert upload.put(WEIGHTS, b"", **query).headers["range"] == f"bytes=0-{half - 1}"
    wrong = upload.put(WEIGHTS, content[half + 1 :], content_range=f"bytes {half + 1}-{total - 1}/{total}")
    assert (wrong.status, wrong.headers["range"]) == (308, f"bytes=0-{half - 1}")
    rest = upload.put(WEIGHTS, content[half:], content_range=f"bytes {half}-{total - 1}/{total}")
    assert (rest.status, rest.headers["range"]) == (200, f"bytes=0-{total - 1}")
    assert upload.put(WEIGHTS, b"", **query).status == 200
    assert upload.put(CONFIG, files[CONFIG]).status == 200
    assert upload.finish().status == 200


def test_the_rest_of_a_file_replaces_what_arrived_after_its_offset_was_requested(
    engine: Engine, ada: Client, files: Mapping[str, bytes]
) -> None:
    upload, content = start(ada), files[WEIGHTS]
    total, half = len(content), len(content) // 2
    upload.put(WEIGHTS, content[:half] + b"late", content_range=f"bytes 0-{half + 3}/{total}")
    rest = upload.put(WEIGHTS, content[half:], content_range=f"bytes {half}-{total - 1}/{total}")
    assert (rest.status, rest.headers["range"]) == (200, f"bytes=0-{total - 1}")
    assert upload.put(CONFIG, files[CONFIG]).status == 200
    path = upload.finish().json["tinker_path"]
    assert fetch(engine, urls(ada, path).json["urls"][WEIGHTS]).body == content


def test_a_file_may_be_sent_again_and_the_last_one_counts(
    engine: Engine, ada: Client, files: Mapping[str, bytes]
) -> None:
    upload = start(ada)
    assert upload.put(CONFIG, b"not json" * 100).status == 200
    before = stored(engine)
    assert upload.put(CONFIG, files[CONFIG]).status == 200
    assert stored(engine) == before - 800 + len(files[CONFIG])
    assert upload.put(WEIGHTS, files[WEIGHTS]).status == 200
    assert upload.finish().status == 200


def test_an_upload_that_lacks_a_file_stays_open(ada: Client, files: Mapping[str, bytes]) -> None:
    upload = start(ada)
    assert upload.put(CONFIG, files[CONFIG]).status == 200
    missing = upload.finish()
    assert (missing.status, f"{WEIGHTS} of {upload.upload_id} has not been sent" in missing.detail) == (
        400,
        True,
    )
    part = files[WEIGHTS][:100]
    upload.put(WEIGHTS, part, content_range=f"bytes 0-99/{len(files[WEIGHTS])}")
    assert f"is incomplete (100 of {len(files[WEIGHTS])} bytes)" in upload.finish().detail
    assert upload.put(WEIGHTS, files[WEIGHTS]).status == 200
    assert upload.finish().status == 200


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (CONFIG, b"{", "cannot be read as JSON"),
        (CONFIG, b"", "cannot be read as JSON"),
        (WEIGHTS, b"no tensors", "cannot be read as safetensors"),
    ],
)
def test_a_bad_file_is_named_and_nothing_is_kept(
    engine: Engine, ada: Client, files: Mapping[str, bytes], name: str, content: bytes, words: str
) -> None:
    before, checkpoints = stored(engine), ada.get("checkpoints").json["cursor"]["total_count"]
    upload = start(ada)
    for each, whole in {**files, name: content}.items():
        upload.put(each, whole)
    rejected = upload.finish()
    assert rejected.status == 400
    assert rejected.detail.startswith(f"{name}: ")
    assert words in rejected.detail
    assert str(engine.store.root) not in rejected.detail
    assert is_gone(engine, upload)
    assert stored(engine) == before
    assert ada.get("checkpoints").json["cursor"]["total_count"] == checkpoints
    assert upload.finish().status == 404
    assert upload.put(name, content).status == 404


def test_other_settings_than_those_of_the_files_are_rejected(
    engine: Engine, ada: Client, files: Mapping[str, bytes]
) -> None:
    upload = start(ada, lora_config={**LORA, "rank": 8})
    for name, content in files.items():
        upload.put(name, content)
    assert "lora_config.rank 8" in upload.finish().detail
    assert is_gone(engine, upload)


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"base_model": "unknown"}, 404, "does not serve a model"),
        ({"base_model": "tiny:peft:1000000"}, 400, "asks for a context of 1000000 tokens"),
        ({"lora_config": {"rank": 100_000}}, 400, "lora_config.rank"),
        ({"lora_config": {"rank": 0}}, 400, "rank"),
        ({"destination_project_id": "x" * 10_000}, 413, "destination_project_id"),
        ({"expires": 5}, 400, "expires"),
    ],
)
def test_an_upload_that_cannot_work_is_not_started(
    ada: Client, more: dict[str, Any], status: int, words: str
) -> None:
    answer = start_answer(ada, **more)
    assert answer.status == status
    assert words in answer.detail


def test_an_upload_can_be_cancelled_and_a_finished_one_cannot(
    engine: Engine, ada: Client, files: Mapping[str, bytes]
) -> None:
    before = stored(engine)
    upload = start(ada)
    upload.put(WEIGHTS, files[WEIGHTS])
    assert stored(engine) > before + len(files[WEIGHTS])
    assert upload.cancel().status == 200
    assert is_gone(engine, upload)
    assert stored(engine) == before
    assert upload.cancel().status == 404
    assert upload.put(WEIGHTS, files[WEIGHTS]).status == 404
    finished = start(ada)
    upload_all(finished, files)
    for rejected in (finished.cancel(), finished.put(CONFIG, files[CONFIG])):
        assert (rejected.status, rejected.headers["x-should-retry"]) == (409, "false")


def test_urls_are_valid_for_one_file_of_one_upload_and_while_their_key_is(
    engine: Engine, files: Mapping[str, bytes]
) -> None:
    key, row = engine.store.users.create_key("eve", time.time(), "laptop")
    eve = Client(build_app(engine), key)
    upload = start(eve)
    url = upload.urls[CONFIG]
    forged = url.replace(url.split("/")[-2], "eyJ.eyJ.AAA")
    assert Client(eve.app).call("PUT", urlsplit(forged).path, b"{}").status == 410
    other = Upload(eve, upload.upload_id, {CONFIG: url.replace(CONFIG, WEIGHTS)})
    other.put(CONFIG, files[CONFIG])
    assert sorted(file.name for file in (engine.store.root / "uploads" / upload.upload_id).iterdir()) == [CONFIG]  # fmt: skip
    download = url.replace("/uploads/", "/downloads/")
    assert fetch(engine, f"http://127.0.0.1{urlsplit(download).path}").status == 410
    engine.store.users.revoke(row.key_id, time.time())
    assert "revoked" in upload.put(CONFIG, files[CONFIG]).detail


@pytest.mark.parametrize(
    "content_range", ["bytes 0-3/2", "bytes 5-2/10", "bytes a-b/c", "items 0-1/2", "bytes 0-99/200"]
)
def test_a_range_that_is_not_that_of_its_body_is_rejected(ada: Client, content_range: str) -> None:
    assert start(ada).put(CONFIG, b"{}", content_range=content_range).status == 400


def test_compressed_files_are_rejected(ada: Client) -> None:
    answer = start(ada).put(CONFIG, b"{}", content_encoding="gzip")
    assert (answer.status, "Content-Encoding" in answer.detail) == (400, True)


@contextmanager
def opened(tiny_model: Path, home: Path, **settings: Any) -> Iterator[Engine]:
    engine = Engine(EngineConfig(home=home, models={"tiny": str(tiny_model)}, long_poll_s=0.25, **settings))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.slow
def test_a_file_that_is_too_large_is_rejected_before_or_while_it_arrives(
    tiny_model: Path, tmp_path: Path
) -> None:
    with opened(tiny_model, tmp_path, max_upload_bytes=1000) as engine:
        upload = start(Client(build_app(engine), engine.api_key))
        assert upload.put(WEIGHTS, b"x" * 1001).status == 413
        assert upload.put(WEIGHTS, b"x" * 1001, content_length="").status == 413
        assert stored(engine) < 2000
        assert upload.put(WEIGHTS, b"x" * 1000).status == 200
    with opened(tiny_model, tmp_path) as engine:
        upload = start(Client(build_app(engine), engine.api_key))
        assert upload.put(CONFIG, b"x" * (1 << 20)).status == 200
        assert upload.put(CONFIG, b"x" * ((1 << 20) + 1)).status == 413


@pytest.mark.slow
def test_uploads_count_against_the_quota_while_they_arrive(
    tiny_model: Path, tmp_path: Path, files: Mapping[str, bytes]
) -> None:
    quota = 130_000
    with opened(tiny_model, tmp_path, max_disk_bytes_per_user=quota) as engine:
        client = Client(build_app(engine), engine.api_key)
        upload = start(client)
        rejected = upload.put(WEIGHTS, b"x" * quota)
        assert (rejected.status, "a user's quota" in rejected.detail) == (507, True)
        assert upload.put(WEIGHTS, b"x" * quota, content_length="").status == 507
        assert engine.store.disk_usage.total("local") < quota
        path = upload_all(upload, files)
        assert engine.store.disk_usage.of("local")["checkpoints"] > len(files[WEIGHTS])
        assert stored(engine) < 2000, "the files of a finished upload no longer count"
        others = [start(client) for _ in range(2)]
        statuses = [other.put(WEIGHTS, files[WEIGHTS]).status for other in others]
        assert statuses == [200, 507]
        assert "finish or cancel uploads" in others[1].put(WEIGHTS, b"x" * 80_000).detail
        others[0].cancel()
        assert others[1].put(WEIGHTS, files[WEIGHTS], content_length="").status == 200, (
            "its size need not be known"
        )
        run = path.removeprefix("tinker://").split("/")[0]
        assert client.get(f"training_runs/{run}").status == 200


@pytest.mark.slow
def test_a_user_has_a_limited_number_of_open_uploads(tiny_model: Path, tmp_path: Path) -> None:
    with opened(tiny_model, tmp_path) as engine:
        engine.store.users.add_key("bob", "tml-bob", 0.0)
        ada, bob = (Client(build_app(engine), key) for key in (engine.api_key, "tml-bob"))
        uploads = [start(ada) for _ in range(64)]
        rejected = start_answer(ada)
        assert (rejected.status, "finish or cancel" in rejected.detail) == (429, True)
        assert start_answer(bob).status == 200
        uploads[0].cancel()
        assert start_answer(ada).status == 200


@pytest.mark.slow
def test_an_abandoned_upload_expires_with_its_files(
    tiny_model: Path, tmp_path: Path, files: Mapping[str, bytes]
) -> None:
    with opened(tiny_model, tmp_path, upload_retention_s=0.2, maintenance_interval_s=3600) as engine:
        upload = start(Client(build_app(engine), engine.api_key))
        expires = engine.store.uploads.get(upload.upload_id)
        assert expires is not None
        while time.time() < expires.expires_at + 0.01:
            time.sleep(0.01)
        assert upload.put(WEIGHTS, files[WEIGHTS]).status == 410
        engine.run_retention()
        assert is_gone(engine, upload)
        assert stored(engine) == 0
        assert upload.finish().status == 404


@pytest.mark.slow
def test_an_upload_continues_after_a_restart(
    tiny_model: Path, tmp_path: Path, files: Mapping[str, bytes]
) -> None:
    total = len(files[WEIGHTS])
    with opened(tiny_model, tmp_path) as engine:
        upload = start(Client(build_app(engine), engine.api_key))
        upload.put(WEIGHTS, files[WEIGHTS][:300], content_range=f"bytes 0-299/{total}")
        finished = start(Client(build_app(engine), engine.api_key))
        upload_all(finished, files)
        (engine.store.root / "uploads" / "upload-unknown").mkdir()
    with opened(tiny_model, tmp_path) as engine:
        assert [each.name for each in (engine.store.root / "uploads").iterdir()] == [upload.upload_id]
        again = Upload(Client(build_app(engine), engine.api_key), upload.upload_id, upload.urls)
        state = again.put(WEIGHTS, b"", content_range=f"bytes */{total}")
        assert (state.status, state.headers["range"]) == (308, "bytes=0-299")
        again.put(WEIGHTS, files[WEIGHTS][300:], content_range=f"bytes 300-{total - 1}/{total}")
        again.put(CONFIG, files[CONFIG])
        assert again.finish().status == 200
        repeated = Upload(again.client, finished.upload_id, finished.urls)
        assert repeated.finish().json["tinker_path"].endswith("/external_weights/uploaded")


def test_the_audit_log_names_uploads(ada: Client, files: Mapping[str, bytes]) -> None:
    upload = start(ada)
    path = upload_all(upload, files)
    start(ada).cancel()
    entries = ada.get("audit?event_type=checkpoints").json["entries"]
    found = [(one["event"], one.get("tinker_path")) for one in entries]
    assert ("checkpoint_create", path) in found
    assert {"checkpoint_upload_start", "checkpoint_upload_cancel"} <= {event for event, _ in found}
