"""What the official client leaves behind: sockets that are not ours to report."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from tests.sessions import close_official_sessions


@pytest.fixture(autouse=True, scope="module")
def collect_what_the_official_client_left() -> Iterator[None]:
    yield
    if close_official_sessions():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def pytest_sessionfinish() -> None:
    warnings.filterwarnings("ignore", category=ResourceWarning)
