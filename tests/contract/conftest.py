"""One suite, six backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tests.contract.backends import ALL, BASE_MODEL, FIXTURES, Backend
from tests.contract.mock_service import KEY, MockService
from tests.servers import ServedEngine
from tinkex._transport.local import LocalTransport
from tinkex.testing import MockTransport


@pytest.fixture(scope="module")
def embedded_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One engine per module: the runs of all modules exceed its limit, and each further run would wait for another to end."""
    return tmp_path_factory.mktemp("embedded")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test runs on all backends, or on those that its marker names."""
    if "backend" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("backends")
        names = marker.args if marker else ALL
        # Several workers, and Ray, take a while to start, so the fast tests do without them.
        marks = {name: [pytest.mark.slow] for name in ("pool", "ray", "cluster")}
        metafunc.parametrize(
            "backend", [pytest.param(name, marks=marks.get(name, ())) for name in names], indirect=True
        )


@pytest.fixture
def backend(request: pytest.FixtureRequest, embedded_home: Path, tiny_model: Path) -> Backend:
    if request.param == "mock":
        service = MockService()
        return Backend(
            service=lambda **more: tinkex.ServiceClient(
                api_key=KEY, base_url="http://mock", transport=MockTransport(service), **more
            ),
            rest=lambda **more: tinkex.RestClient(
                api_key=KEY, base_url="http://mock", transport=MockTransport(service), **more
            ),
        )
    if request.param == "embedded":
        models = {BASE_MODEL: str(tiny_model)}
        return Backend(
            service=lambda **more: tinkex.ServiceClient(
                **{"base_url": "local", "transport": LocalTransport(embedded_home, models), **more}
            ),
            rest=lambda **more: tinkex.RestClient(
                **{"base_url": "local", "transport": LocalTransport(embedded_home, models), **more}
            ),
        )
    served: ServedEngine = request.getfixturevalue(FIXTURES[request.param])
    options = {"base_url": served.url, "api_key": served.key}
    return Backend(
        service=lambda **more: tinkex.ServiceClient(**{**options, **more}),
        rest=lambda **more: tinkex.RestClient(**{**options, **more}),
    )


@pytest.fixture
def service(backend: Backend) -> Iterator[tinkex.ServiceClient]:
    with backend.service() as client:
        yield client
