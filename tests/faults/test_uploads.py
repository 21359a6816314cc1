"""Uploads of weights, and a server that is killed, or whose disk is full."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.durability.killable import MODEL, KillableServer
from tests.faults.test_storage import full_disk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # servers start slowly on a busy machine
]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def server(tmp_path: Path, tiny_model: Path) -> Iterator[KillableServer]:
    with KillableServer(tmp_path, tiny_model, "--long-poll-s", "5") as running:
        yield running


def send(
    url: str, body: bytes, method: str = "PUT", headers: Mapping[str, str] | None = None
) -> tuple[int, Any, Any]:
    """The status, the headers and the JSON content of a reply."""
    request = urllib.request.Request(url, body, dict(headers or {}), method=method)
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
            return answer.status, answer.headers, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, json.loads(error.read())


def call(server: KillableServer, name: str, body: object) -> tuple[int, Any]:
    headers = {"X-API-Key": server.key, "Content-Type": "application/json"}
    status, _, answer = send(f"{server.url}/api/v1/{name}", json.dumps(body).encode(), "POST", headers)
    return status, answer


def exported(server: KillableServer) -> dict[str, bytes]:
    """The files of a run of rank 4."""
    session = call(server, "create_session", {})[1]["session_id"]
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 4, "seed": 1},
    }
    for name, request in (
        ("create_model", body),
        ("save_weights_external", {"model_id": f"{session}:train:0", "path": "out", "seq_id": 1}),
    ):
        request_id = call(server, name, request)[1]["request_id"]
        while call(server, "retrieve_future", {"request_id": request_id})[0] == 408:
            pass
    headers = {"X-API-Key": server.key}
    path = f"training_runs/{session}:train:0/checkpoints/external_weights/out/external_weights_urls"
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=180) as answer:
        urls = json.loads(answer.read())["urls"]
    files = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=180) as answer:
            files[name] = answer.read()
    return files


def test_an_upload_survives_a_kill_between_its_parts_and_after_its_end(server: KillableServer) -> None:
    files = exported(server)
    lora = {"base_model": MODEL, "lora_config": {"rank": 4}}
    upload = call(server, "external_weights_upload_start", lora)[1]
    urls, finish = upload["urls"], {"upload_id": upload["upload_id"]}
    total, half = len(files[WEIGHTS]), len(files[WEIGHTS]) // 2
    assert send(urls[CONFIG], files[CONFIG])[0] == 200
    part = {"Content-Range": f"bytes 0-{half - 1}/{total}"}
    assert send(urls[WEIGHTS], files[WEIGHTS][:half], headers=part)[0] == 308

    server.kill()
    server.start()
    server.wait()
    status, headers, _ = send(urls[WEIGHTS], b"", headers={"Content-Range": f"bytes */{total}"})
    assert (status, headers["range"]) == (308, f"bytes=0-{half - 1}")
    assert "is incomplete" in call(server, "external_weights_upload_finish", finish)[1]["detail"]
    rest = {"Content-Range": f"bytes {half}-{total - 1}/{total}"}
    assert send(urls[WEIGHTS], files[WEIGHTS][half:], headers=rest)[0] == 200

    server.kill()
    server.start()
    server.wait()
    status, answer = call(server, "external_weights_upload_finish", finish)
    assert status == 200, answer

    server.kill()
    server.start()
    server.wait()
    assert call(server, "external_weights_upload_finish", finish) == (200, answer)
    info = call(server, "weights_info", {"tinker_path": answer["tinker_path"]})
    assert (info[0], info[1]["lora_rank"]) == (200, 4)
    assert list((server.home / "engine" / "uploads").iterdir()) == []


def test_an_upload_on_a_full_disk_is_rejected_and_works_after_repair(server: KillableServer) -> None:
    files = exported(server)
    lora = {"base_model": MODEL, "lora_config": {"rank": 4}}
    upload = call(server, "external_weights_upload_start", lora)[1]
    urls, finish = upload["urls"], {"upload_id": upload["upload_id"]}
    assert send(urls[CONFIG], files[CONFIG])[0] == 200
    with full_disk(server):
        status, _, answer = send(urls[WEIGHTS], files[WEIGHTS])
        assert status in {503, 507}, answer
        assert "cannot" in answer["detail"]
        assert call(server, "external_weights_upload_finish", finish)[0] in {400, 503}
    assert send(urls[WEIGHTS], files[WEIGHTS])[0] == 200
    status, answer = call(server, "external_weights_upload_finish", finish)
    assert status == 200, answer
