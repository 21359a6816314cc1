from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import started_engine
from tests.unit.engine.api.asgi import Client
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig


@pytest.fixture(scope="module")
def fuzzed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of an engine that is given nonsense; its polls are short, because nonsense often waits for nothing."""
    config = EngineConfig(
        home=tmp_path_factory.mktemp("fuzzed"),
        models={"tiny": str(tiny_model)},
        long_poll_s=0.02,
        max_body_bytes=300_000,
        gap_timeout_s=1.0,
        max_live_runs=40,
        max_samples_per_request=8,
    )
    with started_engine(config) as engine:
        engine.store.users.add_key("nobody", "tml-not-missed", 0.0)
        yield Client(build_app(engine), engine.api_key)
