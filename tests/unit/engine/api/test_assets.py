"""Image uploads: validation, ownership, quotas and expiry; a failed upload leaves nothing behind."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.api.asgi import Answer, Client
from tinkex._transport.multipart import FileForms, Form
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.intake.assets import MAX_FILES
from tinkex.engine.store.directories import ASSETS

PNG = b"\x89PNG\r\n\x1a\n" + b"the rest of a picture"
JPEG = b"\xff\xd8\xff\xe0" + b"the rest of another"


def upload(client: Client, files: FileForms, fields: dict[str, str] | None = None) -> Answer:
    form = Form(fields or {}, files)

    async def send() -> Answer:
        body = b"".join([piece async for piece in form.read()])
        return await client.acall("POST", "/api/v1/assets", body, {"content-type": form.content_type})

    return asyncio.run(send())


def on_disk(engine: Engine) -> list[bytes]:
    return sorted(file.read_bytes() for file in engine.store.root.glob(f"{ASSETS}/*"))


@pytest.fixture
def kept(engine: Engine) -> Iterator[Engine]:
    """The shared engine, without images of other tests."""
    delete_all(engine)
    yield engine
    delete_all(engine)


def delete_all(engine: Engine) -> None:
    with engine.store.database.transaction() as execute:
        execute("DELETE FROM assets")
    for file in engine.store.root.glob(f"{ASSETS}/*"):
        file.unlink()


def test_images_are_stored_by_the_digest_of_their_content(kept: Engine, ada: Client) -> None:
    answer = upload(ada, [("cat.png", PNG), ("dog", JPEG)], {"ttl_seconds": "60"})
    assert answer.status == 200, answer.body
    cat, dog = answer.json["assets"]
    assert (cat["name"], cat["format"], cat["size_bytes"]) == ("cat.png", "png", len(PNG))
    assert (dog["name"], dog["format"]) == ("dog", "jpeg")
    assert cat["sha256"] == hashlib.sha256(PNG).hexdigest()
    assert cat["location"] == f"asset://{cat['asset_id']}"
    assert on_disk(kept) == sorted([PNG, JPEG])
    assert ada.get(f"assets/{cat['asset_id']}").json == cat
    listed = ada.get("assets").json
    assert {asset["asset_id"] for asset in listed["assets"]} == {cat["asset_id"], dog["asset_id"]}
    assert listed["cursor"]["total_count"] == 2
    assert ada.get("assets?limit=1&offset=1").json["assets"][0]["asset_id"] in {
        cat["asset_id"],
        dog["asset_id"],
    }
    assert ada.call("DELETE", f"/api/v1/assets/{cat['asset_id']}").status == 200
    assert ada.get(f"assets/{cat['asset_id']}").status == 404
    assert ada.call("DELETE", f"/api/v1/assets/{cat['asset_id']}").status == 404
    assert on_disk(kept) == [JPEG]


def test_uploads_are_idempotent(kept: Engine, ada: Client) -> None:
    first, second = (upload(ada, [(name, PNG)]).json["assets"][0] for name in ("old.png", "new.png"))
    assert first["asset_id"] == second["asset_id"]
    assert [asset["name"] for asset in ada.get("assets").json["assets"]] == ["new.png"]
    assert upload(ada, [("a", PNG), ("b", PNG)]).status == 200
    assert on_disk(kept) == [PNG]


def test_an_image_is_visible_only_to_its_owner(kept: Engine, ada: Client, bob: Client) -> None:
    asset_id = upload(ada, [PNG]).json["assets"][0]["asset_id"]
    assert bob.get(f"assets/{asset_id}").status == 404
    assert bob.call("DELETE", f"/api/v1/assets/{asset_id}").status == 404
    assert bob.get("assets").json["assets"] == []
    # The same content uploaded by another user is another image.
    assert upload(bob, [PNG]).json["assets"][0]["asset_id"] == asset_id
    assert bob.call("DELETE", f"/api/v1/assets/{asset_id}").status == 200
    assert ada.get(f"assets/{asset_id}").status == 200
    assert on_disk(kept) == [PNG]
    assert upload(Client(ada.app, "tml-wrong"), [PNG]).status == 401


@pytest.mark.parametrize(
    ("files", "fields", "status", "message"),
    [
        ([("a.gif", b"GIF89a")], {}, 400, "neither a PNG nor a JPEG"),
        ([("empty.png", b"")], {}, 400, "neither a PNG nor a JPEG"),
        ([("a.png", JPEG)], {}, 400, "has content type image/png, but its content is jpeg"),
        ([("fine.png", PNG), ("x.png", b"not")], {}, 400, "'x.png' is neither"),
        ([PNG], {"ttl_seconds": "0"}, 400, "ttl_seconds is '0'"),
        ([PNG], {"ttl_seconds": "soon"}, 400, "ttl_seconds is 'soon'"),
        ([PNG], {"ttl_seconds": str(10**12)}, 400, "ttl_seconds"),
        ([PNG], {"colour": "red"}, 400, "an unknown field 'colour'"),
        ([PNG] * (MAX_FILES + 1), {}, 413, "at most"),
        ([PNG + bytes(60_000)], {}, 413, "limit of 50000 bytes for an image"),
        ([PNG + bytes([n]) * 45_000 for n in range(5)], {}, 413, "limit of 200000 bytes; send fewer images"),
    ],
    ids=range(11),
)
def test_rejected_uploads_leave_no_file(
    kept: Engine, ada: Client, files: Any, fields: dict[str, str], status: int, message: str
) -> None:
    answer = upload(ada, files, fields)
    assert (answer.status, message in answer.detail) == (status, True), answer.body
    assert on_disk(kept) == []
    assert ada.get("assets").json["assets"] == []


def test_other_bodies_and_forms_without_a_file_are_rejected(kept: Engine, ada: Client) -> None:
    assert ada.post("assets", {"a": 1}).status == 400
    form = {"content-type": "multipart/form-data; boundary=x"}
    none = ada.call("POST", "/api/v1/assets", b"--x--\r\n", form)
    assert (none.status, "has no file" in none.detail) == (400, True)
    assert ada.call("POST", "/api/v1/assets", b"--x", form | {"content-encoding": "gzip"}).status == 400
    named = b'--x\r\nContent-Disposition: form-data; name="f"; filename="../../etc/passwd"\r\n\r\n' + PNG
    answer = ada.call("POST", "/api/v1/assets", named + b"\r\n--x--\r\n", form)
    assert answer.json["assets"][0]["name"] == "../../etc/passwd", "the name is never used as a path"
    assert on_disk(kept) == [PNG]
    for odd in ("..%2f..%2fengine.db", "%00", "x" * 500, "asset%3A%2F%2Fx"):
        assert ada.get(f"assets/{odd}").status == 404


def test_a_disconnect_leaves_no_file(kept: Engine, ada: Client) -> None:
    form = Form({}, [("a.png", PNG + bytes(10_000))])

    async def disconnect() -> None:
        body = b"".join([piece async for piece in form.read()])
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": body[:5000], "more_body": True},
            {"type": "http.disconnect"},
        ]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/api/v1/assets",
            "raw_path": b"/api/v1/assets",
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"x-api-key", (ada.key or "").encode()),
                (b"content-type", form.content_type.encode()),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await ada.app(scope, receive, send)

    asyncio.run(disconnect())
    assert on_disk(kept) == []


def test_uploads_and_deletions_are_in_the_audit_log(kept: Engine, ada: Client) -> None:
    asset_id = upload(ada, [PNG]).json["assets"][0]["asset_id"]
    ada.call("DELETE", f"/api/v1/assets/{asset_id}")
    entries = [e for e in ada.get("audit").json["entries"] if e["event"].startswith("asset_")]
    assert [entry["event"] for entry in entries][-2:] in (
        ["asset_create", "asset_delete"],
        ["asset_delete", "asset_create"],
    )
    assert any(asset_id in entry["event_details"].get("assets", []) for entry in entries)


def pointing(location: str, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_asset_pointer", "location": location, "format": kind, "expected_tokens": 4}


@pytest.mark.parametrize("endpoint", ["asample", "stream_sample"])
def test_prompts_with_invalid_image_pointers_are_rejected(kept: Engine, ada: Client, endpoint: str) -> None:
    asset = upload(ada, [PNG]).json["assets"][0]
    sampler = ada.post(
        "create_sampling_session",
        {"session_id": ada.session(), "sampling_session_seq_id": 0, "base_model": "tiny"},
    ).json["sampling_session_id"]

    def sample(chunk: dict[str, Any], seq_id: int) -> Answer:
        request = {
            "num_samples": 1,
            "prompt": {"chunks": [chunk]},
            "sampling_params": {"max_tokens": 1},
            "sampling_session_id": sampler,
            "seq_id": seq_id,
        }
        return ada.post(endpoint, request)

    for number, (chunk, status, message) in enumerate(
        [
            (pointing(asset["location"]), 400, "reads text only"),
            (pointing(asset["location"], "jpeg"), 400, "but it is png"),
            (pointing("asset://0123"), 404, "you have no image asset://0123"),
            (pointing("https://elsewhere/cat.png"), 400, "only images uploaded to this server"),
        ]
    ):
        answer = sample(chunk, number)
        assert (answer.status, message in answer.detail) == (status, True), answer.body


@pytest.fixture
def small(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine with small limits that runs maintenance all the time."""
    config = EngineConfig(
        home=tmp_path,
        models={"tiny": str(tiny_model)},
        max_asset_bytes=100_000,
        max_disk_bytes=250_000,
        max_disk_bytes_per_user=150_000,
        maintenance_interval_s=0.01,
    )
    engine = Engine(config)
    engine.store.users.add_key("bob", "tml-bob", 0.0)
    engine.start()
    yield engine
    engine.close()


def test_quotas_and_size_limits_are_enforced(small: Engine) -> None:
    ada, bob = (Client(build_app(small), key) for key in (small.api_key, "tml-bob"))
    too_large = upload(ada, [("big.png", PNG + bytes(100_000))])
    assert (
        too_large.status,
        "'big.png' is larger than this server's limit of 100000 bytes" in too_large.detail,
    ) == (413, True)
    pictures = [PNG + bytes([n]) * (90_000 - len(PNG)) for n in range(3)]
    assert upload(ada, [pictures[0]]).status == 200
    full = upload(ada, [pictures[1]])
    assert (full.status, "a user's quota is 150000" in full.detail) == (507, True)
    assert upload(ada, [pictures[0]]).status == 200, "a repeated upload does not count twice"
    alone = upload(ada, pictures)
    assert (alone.status, "larger than the storage limit of 150000 bytes" in alone.detail) == (507, True)
    assert upload(bob, [pictures[1]]).status == 200, "quotas are per user"
    crowded = upload(bob, [pictures[2]])
    assert crowded.status == 507
    assert len(on_disk(small)) == 2
    for asset in ada.get("assets").json["assets"]:
        ada.call("DELETE", f"/api/v1/assets/{asset['asset_id']}")
    assert upload(ada, [pictures[2]]).status == 200, "deleted images do not count"


def test_an_expired_image_is_not_found_and_then_deleted(
    small: Engine,
) -> None:
    ada = Client(build_app(small), small.api_key)
    asset_id = upload(ada, [PNG], {"ttl_seconds": "1"}).json["assets"][0]["asset_id"]
    with small.store.database.transaction() as execute:
        execute("UPDATE assets SET expires_at = ?", (time.time() - 1,))
    assert ada.get(f"assets/{asset_id}").status == 404
    deadline = time.monotonic() + 30
    while any((small.store.root / ASSETS).iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert on_disk(small) == []


def test_images_survive_a_restart_and_incomplete_uploads_are_removed(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)})
    engine = Engine(config)
    engine.start()
    upload(Client(build_app(engine), engine.api_key), [PNG])
    half = engine.store.directories.new_asset_path()
    half.write_bytes(b"half")
    (engine.store.root / ASSETS / "unknown").write_bytes(b"no row mentions it")
    engine.close()
    again = Engine(config)
    try:
        again.start()
        assert on_disk(again) == [PNG]
        assert len(Client(build_app(again), again.api_key).get("assets").json["assets"]) == 1
    finally:
        again.close()
