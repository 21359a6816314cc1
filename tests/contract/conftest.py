"""One suite, three backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, Backend, pointing
from tests.contract.mock_service import KEY, MockService
from tests.servers import ServedEngine
from tinkex._transport.local import LocalTransport
from tinkex.testing import MockTransport


@pytest.fixture(scope="session")
def embedded_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(params=["mock", "embedded", "server"])
def backend(request: pytest.FixtureRequest, embedded_home: Path, tiny_model: Path) -> Backend:
    if request.param == "mock":
        service = MockService()
        return Backend(
            service=lambda: tinkex.ServiceClient(
                api_key=KEY, base_url="http://mock", transport=MockTransport(service)
            ),
            rest=lambda: tinkex.RestClient(
                api_key=KEY, base_url="http://mock", transport=MockTransport(service)
            ),
            real=False,
            keyless=True,
        )
    if request.param == "embedded":
        models = {BASE_MODEL: str(tiny_model)}
        return Backend(
            service=lambda: tinkex.ServiceClient(
                base_url="local", transport=LocalTransport(embedded_home, models)
            ),
            rest=lambda: tinkex.RestClient(base_url="local", transport=LocalTransport(embedded_home, models)),
            keyless=True,
        )
    served: ServedEngine = request.getfixturevalue("served_engine")
    return pointing({"base_url": served.url, "api_key": served.key})


@pytest.fixture
def service(backend: Backend) -> Iterator[tinkex.ServiceClient]:
    with backend.service() as client:
        yield client
