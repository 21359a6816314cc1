from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import started_engine
from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = EngineConfig(
        home=tmp_path_factory.mktemp("home"),
        models={"tiny": str(tiny_model)},
        long_poll_s=0.25,
        max_body_bytes=200_000,
        max_asset_bytes=50_000,
    )
    with started_engine(config) as started:
        yield started


@pytest.fixture
def ada(engine: Engine) -> Client:
    """A client with the server's own key, on this machine."""
    return Client(build_app(engine), engine.api_key)


@pytest.fixture
def bob(engine: Engine) -> Client:
    """A client of another user, elsewhere."""
    engine.store.users.add_key("bob", "tml-bob", 0.0)
    return Client(build_app(engine), "tml-bob", host="192.0.2.7")
