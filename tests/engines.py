"""Engines in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine

PATIENCE_S = 120.0


@contextmanager
def started_engine(config: EngineConfig) -> Iterator[Engine]:
    """A started engine whose models are loaded; closes it after the block."""
    engine = Engine(config)
    engine.start()
    try:
        engine.load_models().result(PATIENCE_S)
        yield engine
    finally:
        engine.close()
