from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.engine.api.asgi import Answer, Client
from tests.unit.engine.api.test_sampling import sampler
from tinkex._wire.endpoints import ENDPOINTS
from tinkex.engine.api.app import HANDLERS, build_app
from tinkex.engine.api.compatible.routes import ROUTE_HANDLERS
from tinkex.engine.api.errors import error_response
from tinkex.engine.api.limits import QUERY_PARAMETERS, page
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.errors import Busy, InvalidInput, SetupError, Unsupported


def test_every_endpoint_has_a_handler() -> None:
    assert set(HANDLERS) == set(ENDPOINTS)


def test_an_unknown_path_is_named_in_the_404(ada: Client) -> None:
    answer = ada.post("make_coffee", {})
    assert answer.status == 404
    assert "POST /api/v1/make_coffee" in answer.detail
    assert ada.get("optim_step").status == 405


def test_a_401_says_where_keys_are(engine: Engine) -> None:
    for key in (None, "", "tml-wrong"):
        answer = Client(build_app(engine), key).post("client/config", {"sdk_version": "0.36.0"})
        assert answer.status == 401
        assert "api_key" in answer.detail


def test_health_needs_no_key(engine: Engine) -> None:
    assert Client(build_app(engine)).get("healthz").json == {"status": "ok"}


def test_without_auth_every_key_is_the_local_user(tmp_path: Path, tiny_model: Path) -> None:
    open_engine = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}, auth=False))
    try:
        client = Client(build_app(open_engine))
        assert client.post("create_session", {}).status == 200
        assert len(Client(build_app(open_engine), "tml-any").get("sessions").json["sessions"]) == 1
    finally:
        open_engine.close()


@pytest.mark.parametrize("body", [b"not json", b"[1]", b'{"session_id": 5, "reason": 1}'])
def test_an_invalid_body_is_a_400_that_names_the_endpoint(ada: Client, body: bytes) -> None:
    answer = ada.post("session_heartbeat", body)
    assert answer.status == 400
    assert "session_heartbeat" in answer.detail


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "5000"}, {"limit": "x"}, {"offset": "-1"}])
def test_invalid_pages_are_rejected(query: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(query))):
        page(query, 20)


def test_permanent_rejections_are_never_a_5xx() -> None:
    assert error_response(Unsupported("no")).status_code == 400


def test_a_closed_engine_says_so(tmp_path: Path, tiny_model: Path) -> None:
    engine = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}))
    engine.close()
    answer = Client(build_app(engine), engine.api_key).get("sessions")
    assert answer.status == 503
    assert "closed" in answer.detail


def test_a_poll_that_is_open_while_the_engine_closes_says_so(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(EngineConfig(home=tmp_path, models={"tiny": str(tiny_model)}))
    engine.start()
    ada = Client(build_app(engine), engine.api_key)
    sampler_id = sampler(ada)

    async def poll() -> Answer:
        target = {"sampling_session_id": sampler_id}
        held = asyncio.create_task(ada.acall("POST", "/api/v1/retrieve_futures", {"target": target}))
        while not engine.stats().polls:  # noqa: ASYNC110 -- set by another task of this loop
            await asyncio.sleep(0)
        engine.close()  # before the poll's task runs again
        return await held

    answer = asyncio.run(poll())
    assert answer.status == 503
    assert "closed" in answer.detail
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_busy_errors_carry_a_queue_state() -> None:
    answer = error_response(Busy("too much"))
    assert answer.status_code == 429
    assert b'"queue_state":"paused_capacity"' in answer.body
    assert answer.headers["retry-after"] == "1"


def test_an_error_that_is_not_the_engines_is_a_500() -> None:
    assert error_response(SetupError("no model")).status_code == 500


def test_unknown_query_parameters_are_rejected_with_their_name(ada: Client) -> None:
    assert ada.get("training_runs?limit=3&offset=0&access_scope=owned&project_id=p").status == 200
    misspelt = ada.get("training_runs?limits=3")
    assert misspelt.status == 400
    assert "'limits'" in misspelt.detail
    assert "limit, offset" in misspelt.detail
    assert ada.call("POST", "/api/v1/create_session?tags=a", {}).status == 400
    assert {*QUERY_PARAMETERS} <= {*ENDPOINTS, *ROUTE_HANDLERS}
