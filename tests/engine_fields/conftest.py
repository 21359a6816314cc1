from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_fields.rig import MODEL, OTHER_MODEL, Rig
from tests.engines import started_engine
from tests.models import tiny_llama
from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig


@pytest.fixture(scope="session")
def rig(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    other = tiny_llama(tmp_path_factory.mktemp("models") / "other", seed=1)
    config = EngineConfig(
        home=tmp_path_factory.mktemp("fields"),
        models={MODEL: str(tiny_model), OTHER_MODEL: str(other)},
        long_poll_s=0.25,
        # Runs of one proof stay out of the next: none is ended, and all fit.
    )
    with started_engine(config) as engine:
        engine.store.users.add_key("bob", "tml-bob", 0.0)
        app = build_app(engine)
        yield Rig(engine, Client(app, engine.api_key), Client(app, "tml-bob", host="192.0.2.7"))
