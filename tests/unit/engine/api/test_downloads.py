"""Exports, archives and copies: what leaves the server, by which address, and for whom."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pyrage
import pytest
from safetensors.numpy import load

from tests.unit.engine.api.asgi import Answer, Client
from tests.unit.engine.api.test_training import optim_step, pass_body, send_pass
from tinkex.engine.api.app import build_app
from tinkex.engine.api.auth import signer_of
from tinkex.engine.engine import Engine

FILES = {"adapter_config.json", "adapter_model.safetensors"}


def save(client: Client, run: str, seq_id: int, name: str = "kept") -> str:
    request = {"model_id": run, "path": name, "seq_id": seq_id, "overwrite": False, "type": "save_weights"}
    path: str = client.result(client.post("save_weights", request)).json["path"]
    return path


def export(client: Client, run: str, seq_id: int, name: str = "out", **more: Any) -> Answer:
    request = {"model_id": run, "path": name, "seq_id": seq_id, "type": "save_weights_external", **more}
    submitted = client.post("save_weights_external", request)
    return client.result(submitted) if submitted.status == 200 else submitted


def urls(client: Client, path: str) -> Answer:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return client.get(f"training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")


def archive(client: Client, path: str) -> Answer:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return client.get(f"training_runs/{run}/checkpoints/{kind}/{name}/archive")


def fetch(engine: Engine, url: str, **headers: str) -> Answer:
    """As urllib does: no key, nothing but the address."""
    parts = urlsplit(url)
    assert (parts.scheme, parts.netloc) == ("http", "127.0.0.1")
    return Client(build_app(engine)).call("GET", parts.path, headers=headers)


def test_an_export_is_a_peft_directory_behind_signed_addresses(engine: Engine, ada: Client) -> None:
    run = ada.create(rank=4)
    reported = export(ada, run, 1).json
    assert reported["path"] == f"tinker://{run}/external_weights/out"
    answer = urls(ada, reported["path"]).json
    assert set(answer["urls"]) == FILES
    left = datetime.fromisoformat(answer["expires"]).timestamp() - time.time()
    assert 600 < left <= 3600
    files = {name: fetch(engine, url) for name, url in answer["urls"].items()}
    for file in files.values():
        assert file.status == 200
        assert int(file.headers["content-length"]) == len(file.body)
    assert sum(len(file.body) for file in files.values()) == reported["size_bytes"]
    config = json.loads(files["adapter_config.json"].body)
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    tensors = load(files["adapter_model.safetensors"].body)
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[0] == 4


def test_an_address_that_was_changed_or_is_over_leads_nowhere(engine: Engine, ada: Client) -> None:
    path = export(ada, ada.create(), 1).json["path"]
    url = urls(ada, path).json["urls"]["adapter_config.json"]
    token = url.split("/")[-2]
    broken = url.replace(token, token[:-3] + ("AAA" if token[-3:] != "AAA" else "BBB"))
    assert fetch(engine, broken).status == 410
    claims = {"owner": "local", "path": path, "directory": "../..", "file": "api_key"}
    signer = signer_of(engine)
    for late in (-1.0, 60.0):
        forged = signer.issue("download", claims, time.time() + late)
        assert fetch(engine, url.replace(token, forged)).status == 410
    ada.call(
        "DELETE", f"/api/v1/training_runs/{path.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}"
    )
    assert fetch(engine, url).status == 404


def test_an_address_is_over_when_the_key_that_requested_it_is_revoked(engine: Engine) -> None:
    (first, first_row), (second, _) = (
        engine.store.users.create_key("dana", time.time(), name) for name in ("laptop", "desktop")
    )
    laptop, desktop = Client(build_app(engine), first), Client(build_app(engine), second)
    path = export(laptop, laptop.create(), 1).json["path"]
    token = Client(laptop.app, laptop.post("auth/token", {}).json["jwt"])
    requested = [
        urls(client, path).json["urls"]["adapter_config.json"] for client in (laptop, token, desktop)
    ]
    requested.append(archive(laptop, path).headers["location"])
    requested.append(laptop.get(f"sessions/{laptop.session()}/trace_export").json["url"])
    assert [fetch(engine, url).status for url in requested] == [200] * 5
    engine.store.users.revoke(first_row.key_id, time.time())
    answers = [fetch(engine, url) for url in requested]
    assert [answer.status for answer in answers] == [410, 410, 200, 410, 410]
    assert "revoked" in answers[0].detail


def test_an_archive_comes_whole_or_in_parts(engine: Engine, ada: Client) -> None:
    run = ada.create()
    ada.result(send_pass(ada, pass_body(run, 1)))
    ada.result(ada.post("optim_step", optim_step(run, 2)))
    answer = archive(ada, save(ada, run, 3))
    assert answer.status == 302
    url = answer.headers["location"]
    assert answer.json["url"] == url
    assert answer.headers["expires"].endswith("GMT")
    whole = fetch(engine, url)
    assert int(whole.headers["content-length"]) == len(whole.body)
    with tarfile.open(fileobj=io.BytesIO(whole.body)) as tar:
        assert FILES | {"optimizer.safetensors", "manifest.json"} == set(tar.getnames())
        member = tar.extractfile("adapter_model.safetensors")
        assert member is not None
        assert load(member.read())
    half = len(whole.body) // 2
    first, rest = (fetch(engine, url, range=f"bytes={span}") for span in (f"0-{half - 1}", f"{half}-"))
    assert (first.status, rest.status) == (206, 206)
    assert rest.headers["content-range"] == f"bytes {half}-{len(whole.body) - 1}/{len(whole.body)}"
    assert first.body + rest.body == whole.body
    assert fetch(engine, url, range=f"bytes={len(whole.body)}-").status == 416


def test_an_encrypted_export_opens_with_the_identity_only(engine: Engine, ada: Client) -> None:
    run, identity = ada.create(), pyrage.x25519.Identity.generate()
    recipients = [str(identity.to_public())]
    path = export(ada, run, 1, age_encryption_recipients=recipients).json["path"]
    links = urls(ada, path).json["urls"]
    assert set(links) == {f"{name}.age" for name in FILES}
    secret = fetch(engine, links["adapter_config.json.age"]).body
    assert json.loads(pyrage.decrypt(secret, [identity]))["r"] == 4
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(secret, [pyrage.x25519.Identity.generate()])


@pytest.mark.parametrize("recipients", [[], ["nobody"], ["age1", "ssh-rsa x"]])
def test_recipients_that_are_none_are_rejected_and_the_run_continues(
    ada: Client, recipients: list[str]
) -> None:
    run = ada.create()
    answer = export(ada, run, 1, age_encryption_recipients=recipients)
    assert answer.status == 400
    assert "recipient" in answer.detail
    assert export(ada, run, 2).json["path"]


def test_an_export_is_neither_loaded_nor_sampled_nor_taken_twice(ada: Client) -> None:
    session = ada.session()
    run = ada.create(session)
    path = export(ada, run, 1).json["path"]
    assert "exists already" in export(ada, run, 2).detail
    load_request = {"model_id": run, "seq_id": 3, "path": path, "type": "load_weights"}
    assert ada.post("load_weights", load_request).status == 400
    sampling = {"session_id": session, "sampling_session_seq_id": 9, "model_path": path}
    assert ada.post("create_sampling_session", sampling).status == 400
    assert urls(ada, save(ada, run, 4)).status == 400


def test_a_copy_is_a_checkpoint_of_its_own(engine: Engine, ada: Client) -> None:
    run = ada.create()
    ada.result(send_pass(ada, pass_body(run, 1)))
    ada.result(ada.post("optim_step", optim_step(run, 2)))
    path = save(ada, run, 3)
    request = {"source_path": path, "destination_project_id": "archive", "ttl_seconds": 7200}
    copied = ada.post("copy_weights", request, x_idempotency_key="k1").json["tinker_path"]
    assert ada.post("copy_weights", request, x_idempotency_key="k1").json["tinker_path"] == copied
    assert ada.post("copy_weights", request, x_idempotency_key="k2").json["tinker_path"] != copied
    new_run, kind, name = copied.removeprefix("tinker://").split("/")
    assert (kind, name) == ("weights", "kept")
    assert [r["training_run_id"] for r in ada.get("training_runs?project_id=archive").json["training_runs"]]
    store = engine.store
    source, target = (store.checkpoints.get(r, "weights", "kept") for r in (run, new_run))
    assert source is not None
    assert target is not None
    assert target.expires_at is not None
    files = [store.directories.resolve(row.directory) / "optimizer.safetensors" for row in (source, target)]
    assert files[0].stat().st_ino == files[1].stat().st_ino, "no bytes are copied"
    ada.call("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/kept")
    session = ada.session()
    create = {
        "session_id": session,
        "model_seq_id": 0,
        "path": copied,
        "optimizer": True,
        "type": "load_weights",
    }
    resumed = ada.result(ada.post("load_weights", create)).json
    assert resumed["model_id"] == f"{session}:train:0"
    assert send_pass(ada, pass_body(new_run, 1)).status == 410, "a copy cannot be trained on"


def test_a_copy_can_take_a_place_in_a_session(ada: Client) -> None:
    session = ada.session()
    path = save(ada, ada.create(session), 1)
    request = {"source_path": path, "session_id": session, "model_seq_id": 5}
    assert ada.post("copy_weights", request).json["tinker_path"] == f"tinker://{session}:train:5/weights/kept"
    assert ada.post("copy_weights", request).status == 400
    assert ada.post("copy_weights", {"source_path": path, "session_id": session}).status == 400


def test_weights_of_others_need_to_be_public_or_come_with_their_key(ada: Client, bob: Client) -> None:
    run = ada.create()
    path, exported = save(ada, run, 1), export(ada, run, 2).json["path"]
    copy = {"source_path": path, "destination_project_id": "p"}
    assert bob.post("copy_weights", copy).status == 404
    assert archive(bob, path).status == 404
    assert urls(bob, exported).status == 404
    assert ada.key is not None
    header = {"x_tinker_weights_access_token": ada.key}
    assert bob.post("copy_weights", copy, **header).status == 200
    assert bob.post("copy_weights", copy, x_tinker_weights_access_token="tml-wrong").status == 403
    token = ada.post("auth/token", {}).json["jwt"]
    session = bob.session()
    for number, (secret, status) in enumerate([(None, 404), ("tml-wrong", 403), (token, 200)]):
        request = {"session_id": session, "model_seq_id": number, "path": path, "type": "load_weights"}
        answer = bob.post("load_weights", {**request, **({"weights_access_token": secret} if secret else {})})
        assert answer.status == status, answer.body
    assert bob.result(answer).json["model_id"] == f"{session}:train:2"
    publish = f"/api/v1/training_runs/{run}/checkpoints/weights/kept/publish"
    ada.call("POST", publish)
    assert bob.post("copy_weights", copy).status == 200
    public = archive(bob, path)
    ada.call("DELETE", publish)
    assert bob.post("copy_weights", copy).status == 404
    assert Client(bob.app).call("GET", urlsplit(public.headers["location"]).path).status == 404


def test_the_secret_of_another_account_is_never_written_down(
    engine: Engine, ada: Client, bob: Client
) -> None:
    path = save(ada, ada.create(), 1)
    secret = f"tml-{'s' * 30}"
    engine.store.users.add_key("local", secret, 0.0)
    request = {"session_id": bob.session(), "model_seq_id": 0, "path": path, "weights_access_token": secret}
    bob.result(bob.post("load_weights", request))
    for file in engine.store.root.glob("engine.db*"):
        assert secret.encode() not in file.read_bytes()


def test_callers_in_the_process_get_files_to_read(engine: Engine, ada: Client) -> None:
    run = ada.create()
    path, exported = save(ada, run, 1), export(ada, run, 2).json["path"]
    embedded = Client(ada.app, ada.key, host=None)
    links = urls(embedded, exported).json["urls"]
    with urlopen(links["adapter_config.json"]) as file:
        assert json.loads(file.read())["r"] == 4
    location = archive(embedded, path).headers["location"]
    with urlopen(location) as file, tarfile.open(fileobj=io.BytesIO(file.read())) as tar:
        assert "manifest.json" in tar.getnames()
    assert Path(urlsplit(links["adapter_config.json"]).path).is_relative_to(engine.store.root)


@asynccontextmanager
async def no_free_thread() -> AsyncIterator[Callable[[], None]]:
    """Work in threads of this loop does not begin before the function is called."""
    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    blocking = asyncio.get_running_loop().run_in_executor(None, release.wait)
    try:
        yield release.set
    finally:
        release.set()
        await blocking


async def started(engine: Engine, call: Awaitable[Answer]) -> asyncio.Future[Answer]:
    """The call as a task, once the engine has begun to write a file for it."""
    before = set(engine.store.directories.downloads().iterdir())
    task = asyncio.ensure_future(call)
    while set(engine.store.directories.downloads().iterdir()) == before:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0)
    return task


def archive_path(path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"


def test_other_calls_on_the_loop_complete_while_an_archive_is_written(engine: Engine, ada: Client) -> None:
    path = save(ada, ada.create(), 1)
    embedded = Client(ada.app, ada.key, host=None)

    async def run() -> Answer:
        async with no_free_thread() as release:
            writing = await started(engine, embedded.acall("GET", archive_path(path)))
            for _ in range(3):
                assert (await embedded.acall("GET", "/api/v1/healthz")).status == 200
                assert (await embedded.acall("GET", "/api/v1/training_runs")).status == 200
            assert not writing.done()
            release()
            return await writing

    written = asyncio.run(run())
    with tarfile.open(urlsplit(written.headers["location"]).path) as tar:
        assert "adapter_model.safetensors" in tar.getnames()


def test_a_checkpoint_deleted_while_its_archive_is_written_is_gone(engine: Engine, ada: Client) -> None:
    run_id = ada.create()
    path = save(ada, run_id, 1)
    (checkpoint,) = engine.store.checkpoints.of_run(run_id, time.time())
    directory = engine.store.directories.resolve(checkpoint.directory)
    embedded = Client(ada.app, ada.key, host=None)
    before = set(engine.store.directories.downloads().iterdir())

    async def run() -> Answer:
        async with no_free_thread() as release:
            writing = await started(engine, embedded.acall("GET", archive_path(path)))
            deleted = await embedded.acall("DELETE", archive_path(path).removesuffix("/archive"))
            assert deleted.status == 200
            while directory.exists():  # noqa: ASYNC110 -- the engine thread removes it
                await asyncio.sleep(0.01)
            release()
            return await writing

    answer = asyncio.run(run())
    assert (answer.status, path in answer.detail) == (410, True)
    assert set(engine.store.directories.downloads().iterdir()) == before, "nothing is left of it"


def test_exports_are_not_listed_to_clients_that_cannot_read_them(ada: Client) -> None:
    run = ada.create()
    save(ada, run, 1)
    export(ada, run, 2)
    for version, kinds in (("0.27.2", ["weights"]), ("0.28.0", ["weights", "external_weights"])):
        headers = {"x-stainless-package-version": version}
        listed = ada.call("GET", f"/api/v1/training_runs/{run}/checkpoints", headers=headers).json
        assert [each["checkpoint_id"].split("/")[0] for each in listed["checkpoints"]] == kinds
        mine = ada.call("GET", "/api/v1/checkpoints?limit=1000", headers=headers).json
        assert mine["cursor"]["total_count"] == len(mine["checkpoints"])
        exported = {each["checkpoint_type"] for each in mine["checkpoints"]} & {"external"}
        assert bool(exported) == (len(kinds) == 2)


def test_a_copy_requested_twice_simultaneously_is_made_once(engine: Engine, ada: Client) -> None:
    path = save(ada, ada.create(), 1)
    request = {"source_path": path, "destination_project_id": "p"}
    headers = {"x-idempotency-key": "twice"}

    async def both() -> list[Answer]:
        calls = [ada.acall("POST", "/api/v1/copy_weights", request, headers) for _ in range(4)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(both())
    assert [answer.status for answer in answers] == [200] * 4
    (copied,) = {answer.json["tinker_path"] for answer in answers}
    run = copied.removeprefix("tinker://").split("/")[0]
    assert engine.store.runs.get(run) is not None
