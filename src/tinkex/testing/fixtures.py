"""Fixtures for pytest: put ``pytest_plugins = ["tinkex.testing.fixtures"]`` into your ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tinkex.testing.engine import LocalEngine, local_engine

if TYPE_CHECKING:
    from tinkex.clients.service import ServiceClient

__all__ = ["tinkex_engine", "tinkex_service"]


@pytest.fixture(scope="session")
def tinkex_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """An engine on a tiny random model, for the whole test session."""
    with local_engine(home=tmp_path_factory.mktemp("tinkex-engine")) as engine:
        yield engine


@pytest.fixture
def tinkex_service(tinkex_engine: LocalEngine) -> Iterator[ServiceClient]:
    """A service client of that engine, with a new session for each test."""
    with tinkex_engine.service() as service:
        yield service
