"""Web pages: what a server without keys rejects, and CORS for the origins that are allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import started_engine
from tests.unit.engine.api.asgi import PROTO, Answer, Client
from tests.unit.engine.api.test_training import pass_body, send_pass
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.errors import SetupError

CHAT = "http://localhost:3000"


@pytest.fixture(scope="module")
def without_keys(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = EngineConfig(
        home=tmp_path_factory.mktemp("open"),
        models={"tiny": str(tiny_model)},
        auth=False,
        allow_origins=(CHAT,),
    )
    with started_engine(config) as engine:
        yield engine


@pytest.fixture
def anyone(without_keys: Engine) -> Client:
    return Client(build_app(without_keys))


def create_session(client: Client, **headers: str) -> Answer:
    return client.post("create_session", {}, content_length="2", **headers)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8787", "127.8.9.10", "[::1]:8787"])
def test_without_keys_a_loopback_host_is_accepted(anyone: Client, host: str) -> None:
    assert create_session(anyone, host=host).status == 200
    assert create_session(anyone, host=host, origin=f"http://{host}").status == 200


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example",
        "rebound.example:87",
        "127.0.0.1.rebound.example",
        "localhost:80@x",
        "192.0.2.1",
        "[::2]",
        "",
    ],
)
def test_without_keys_a_name_that_may_be_rebound_is_rejected(anyone: Client, host: str) -> None:
    answer = create_session(anyone, host=host)
    assert answer.status == 403
    assert "127.0.0.1" in answer.detail
    assert "--no-auth" in answer.detail


@pytest.mark.parametrize(
    "origin", ["null", "https://pages.example", "http://127.0.0.1:3000", "http://localhost", "file://", ""]
)
def test_without_keys_a_page_of_another_origin_is_rejected(anyone: Client, origin: str) -> None:
    answer = create_session(anyone, origin=origin)
    assert answer.status == 403
    assert "--allow-origin" in answer.detail
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_without_keys_a_request_that_another_site_caused_is_rejected(
    anyone: Client, site: str, status: int
) -> None:
    answer = anyone.call("GET", "/api/v1/healthz", headers={"sec-fetch-site": site})
    assert answer.status == status


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "text/plain; application/json", "application/x-www-form-urlencoded", "multipart/form-data", ""],
)  # fmt: skip
def test_without_keys_a_content_type_that_pages_send_without_preflight_is_rejected(
    anyone: Client, content_type: str
) -> None:
    answer = create_session(anyone, content_type=content_type)
    assert answer.status == 415
    assert "Content-Type" in answer.detail


def test_without_keys_the_content_types_of_clients_are_accepted(anyone: Client) -> None:
    assert create_session(anyone, content_type="application/json; charset=utf-8").status == 200
    run = anyone.create()
    assert anyone.result(send_pass(anyone, pass_body(run, 1)), accept=PROTO).status == 200
    # Uploads are multipart; this one is rejected for its content, not for its type.
    form = anyone.post("assets", b"--x--", content_length="5", content_type="multipart/form-data; boundary=x")
    assert form.status not in {403, 415}


def test_a_caller_in_this_process_needs_no_host(without_keys: Engine) -> None:
    inside = Client(build_app(without_keys), host=None)
    assert create_session(inside, content_type="text/plain").status == 200


def test_an_allowed_origin_gets_cors_and_others_do_not(anyone: Client, engine: Engine) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    preflight = anyone.call(
        "OPTIONS", "/api/v1/create_session", headers={**asked, "origin": CHAT, "sec-fetch-site": "cross-site"}
    )
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == CHAT
    assert preflight.headers["access-control-allow-headers"] == "x-api-key"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    answer = create_session(anyone, origin=CHAT, sec_fetch_site="cross-site")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, CHAT)
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers
    # A server with keys and no allowed origins answers preflights of none.
    keyed = Client(build_app(engine)).call(
        "OPTIONS", "/api/v1/create_session", headers={**asked, "origin": CHAT}
    )
    assert keyed.status == 405
    assert "access-control-allow-origin" not in keyed.headers


def test_with_keys_the_key_decides_and_not_the_host_or_the_origin(engine: Engine, ada: Client) -> None:
    page = {"host": "models.example", "origin": "https://pages.example", "sec_fetch_site": "cross-site"}
    assert create_session(ada, **page).status == 200
    assert create_session(Client(build_app(engine)), **page).status == 401


@pytest.mark.parametrize("origin", ["*", "null", "chat.example", "https://chat.example/path", "https://", ""])
def test_what_is_not_an_origin_cannot_be_allowed(origin: str) -> None:
    with pytest.raises(SetupError, match="allow_origins"):
        EngineConfig(allow_origins=(origin,))


def test_an_allowed_origin_is_compared_as_browsers_send_it() -> None:
    given = ("HTTPS://Chat.Example:443", "http://localhost:80", "http://[::1]:3000", "tauri://localhost")
    expected = ("https://chat.example", "http://localhost", "http://[::1]:3000", "tauri://localhost")
    assert EngineConfig(allow_origins=given).allow_origins == expected
