"""The public surface is complete: two forms of every method, a caller and a handler for every endpoint."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import tinkex
from tinkex._wire.endpoints import ENDPOINTS, Endpoint
from tinkex.clients._assets import AssetMethods
from tinkex.clients._raw_calls import RawMethods

SRC = Path(__file__).parents[2] / "src" / "tinkex"
CLIENTS = [
    tinkex.ServiceClient,
    tinkex.TrainingClient,
    tinkex.SamplingClient,
    tinkex.RestClient,
    AssetMethods,
    RawMethods,
    tinkex.AdminClient,
]
SYNC_ONLY = {
    ("ServiceClient", "close"),
    ("ServiceClient", "copy_weights"),
    ("ServiceClient", "create_custom_loss"),
    ("ServiceClient", "create_rest_client"),
    ("ServiceClient", "get_console_url"),
    ("ServiceClient", "get_telemetry"),
    ("TrainingClient", "get_console_url"),
    ("TrainingClient", "get_telemetry"),
    ("SamplingClient", "create"),
    ("SamplingClient", "from_sampler_handle"),
    ("SamplingClient", "get_sampler_handle"),
    ("SamplingClient", "get_telemetry"),
    ("SamplingClient", "on_queue_state_change"),
    ("TrainingClient", "get_tokenizer"),
    ("SamplingClient", "get_tokenizer"),
    ("RestClient", "get_telemetry"),
    ("AdminClient", "get_telemetry"),
}
"""No twin in the official SDK either."""


NOT_COROUTINE_FUNCTIONS = {"unload_async"}
"""Programs list the coroutine functions of a client; the official one does not have these."""


def public_methods(client: type) -> list[str]:
    return [
        name
        for name, member in inspect.getmembers(client)
        if not name.startswith("_")
        and inspect.isfunction(inspect.unwrap(member))
        and member.__qualname__.startswith(client.__name__)
    ]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: c.__name__)
def test_every_method_has_an_async_twin_with_the_same_signature(client: type) -> None:
    for name in public_methods(client):
        if name.endswith("_async"):
            method = getattr(client, name)
            is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
            assert is_async == (name not in NOT_COROUTINE_FUNCTIONS), name
            continue
        if (client.__name__, name) in SYNC_ONLY:
            continue
        twin = getattr(client, f"{name}_async", None)
        assert twin is not None, f"{client.__name__}.{name} has no async twin"
        mine, other = inspect.signature(getattr(client, name)), inspect.signature(twin)
        assert list(mine.parameters.values()) == list(other.parameters.values()), name


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: c.__name__)
def test_every_public_method_is_documented(client: type) -> None:
    assert client.__doc__
    for name in public_methods(client):
        assert getattr(client, name).__doc__, f"{client.__name__}.{name}"


def test_every_exported_name_resolves() -> None:
    for name in tinkex.__all__:
        assert getattr(tinkex, name) is not None
    assert set(tinkex.__all__) <= set(dir(tinkex))


@pytest.mark.parametrize("row", ENDPOINTS.values(), ids=lambda r: r.name)
def test_every_row_we_call_has_a_caller(row: Endpoint) -> None:
    if not row.called_by_us:
        return
    sources = [
        *(SRC / "clients").glob("*.py"),
        SRC / "futures.py",
        *(SRC / "_transport").glob("*.py"),
        *(SRC / "tokenizers").glob("*.py"),
        *(SRC / "observability" / "telemetry").glob("*.py"),
    ]
    assert any(f'"{row.name}"' in path.read_text() for path in sources), row.name


def test_every_row_is_served() -> None:
    from tinkex.engine.api.app import HANDLERS

    assert set(HANDLERS) == set(ENDPOINTS)
