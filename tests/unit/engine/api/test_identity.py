"""API keys, and tokens issued for them."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.app import build_app
from tinkex.engine.api.auth import signer_of
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.store import Store


def claims(token: str) -> dict[str, Any]:
    body = token.split(".")[1]
    decoded: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=="))
    return decoded


def test_a_token_replaces_its_key(engine: Engine, bob: Client) -> None:
    session = bob.session()
    token = bob.post("auth/token", {}).json["jwt"]
    by_token = Client(bob.app, token)
    assert by_token.get("sessions").json["sessions"][0] == session
    assert claims(token)["sub"] == "tml:user:bob"
    assert claims(token)["exp"] > time.time() + 600


def test_a_forged_expired_or_misused_token_is_rejected(engine: Engine, bob: Client) -> None:
    token = bob.post("auth/token", {}).json["jwt"]
    head, body, signature = token.split(".")
    forged = base64.urlsafe_b64encode(json.dumps({**claims(token), "key": 1}).encode()).decode().rstrip("=")
    signer, key = signer_of(engine), claims(token)["key"]
    bad = [
        f"{head}.{forged}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}",
        "eyJ",
        signer.issue("call", {"key": key}, time.time() - 1),
        signer.issue("download", {"key": key}, time.time() + 60),
    ]
    for credential in bad:
        assert Client(bob.app, credential).get("sessions").status == 401, credential


def test_a_key_can_be_shown_and_revoked_with_its_tokens(engine: Engine) -> None:
    key, row = engine.store.users.create_key("carol@example.org", time.time(), "laptop")
    carol = Client(build_app(engine), key)
    shown = carol.get("auth/apikey/me").json
    assert shown["key_id"] == row.key_id
    assert (shown["name"], shown["details"]["user_details"]["email"]) == ("laptop", "carol@example.org")
    by_token = Client(carol.app, carol.post("auth/token", {}).json["jwt"])
    assert by_token.get("sessions").status == 200
    assert carol.call("DELETE", "/api/v1/auth/apikey/me").status == 200
    assert carol.get("sessions").status == 401
    log = engine.store.audit.between("carol@example.org", 0, time.time() + 1, "organizations", 10)
    assert [entry.event for entry in log] == ["key_create", "token_create", "key_revoke"]
    assert [log[n].details["key_id"] for n in (0, 2)] == [shown["key_id"]] * 2
    assert by_token.get("sessions").status == 401


def test_a_server_without_auth_rejects_key_requests(tmp_path: Path, tiny_model: Path) -> None:
    engine = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}, auth=False))
    try:
        client = Client(build_app(engine))
        assert not client.post("client/config", {}).json["pjwt_auth_enabled"]
        answer = client.post("auth/token", {})
        assert answer.status == 400
        assert "--no-auth" in answer.detail
    finally:
        engine.close()


def test_tokens_stay_valid_after_a_restart_and_a_revoked_server_key_is_replaced(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        first, secret = store.local_key(0.0), store.signing_key
        found = store.users.find_key(first)
        assert found is not None
        store.users.revoke(found.key_id, 1.0)
    assert (tmp_path / "signing_key").stat().st_mode & 0o077 == 0
    with Store(tmp_path) as store:
        second = store.local_key(2.0)
        assert store.signing_key == secret
        assert second != first
        assert store.users.find(first) is None
        assert store.users.find(second) == "local"
        assert [key.revoked_at for key in store.users.all_keys("local")] == [1.0, None]
