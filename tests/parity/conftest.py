"""The official client leaves sockets behind, which are not ours to report: it never closes the pool that fetches its configuration."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


def pytest_sessionfinish() -> None:
    warnings.filterwarnings("ignore", category=ResourceWarning)
