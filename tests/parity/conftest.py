"""A server per module, and what the official client leaves behind: sockets that are not ours to report."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import ServedEngine, serve


@pytest.fixture(scope="module")
def served_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """`tinkex serve` with the tiny model. Older clients never end their sessions, so no server serves them all."""
    with serve(tmp_path_factory.mktemp("served"), "--model", f"tiny/llama={tiny_model}") as engine:
        yield engine


@pytest.fixture(autouse=True, scope="module")
def collect_what_the_official_client_left() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def pytest_sessionfinish() -> None:
    warnings.filterwarnings("ignore", category=ResourceWarning)
