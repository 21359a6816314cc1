"""The REST client: one request per method, in the protocol's words."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import pytest

from tinkex import types
from tinkex.clients.rest import RestClient
from tinkex.clients.service import ServiceClient
from tinkex.errors import NotFoundError
from tinkex.futures import APIFuture
from tinkex.testing import MockTransport, reply

WHEN = "2026-11-15T12:00:00Z"
CHECKPOINT = {
    "checkpoint_id": "weights/0001",
    "checkpoint_type": "training",
    "time": WHEN,
    "tinker_path": "tinker://s:train:0/weights/0001",
}
RUN = {
    "training_run_id": "s:train:0",
    "base_model": "toy",
    "model_owner": "me",
    "is_lora": True,
    "last_request_time": WHEN,
    "last_checkpoint": CHECKPOINT,
}
CURSOR = {"offset": 0, "limit": 20, "total_count": 1}
WEIGHTS = {"base_model": "toy", "is_lora": True, "lora_rank": 8}
PATH = "tinker://s:train:0/weights/0001"
OWNED = {"access_scope": "owned"}

METHODS: list[tuple[str, tuple[Any, ...], Any, str, dict[str, str]]] = [
    ("get_training_run", ("s:train:0",), RUN, "GET training_runs/s:train:0", OWNED),
    (
        "get_training_run_by_tinker_path",
        (PATH, "accessible"),
        RUN,
        "GET training_runs/s:train:0",
        {"access_scope": "accessible"},
    ),
    (
        "list_training_runs",
        (5, 10, "owned", "p1"),
        {"training_runs": [RUN], "cursor": CURSOR},
        "GET training_runs",
        {"limit": "5", "offset": "10", "access_scope": "owned", "project_id": "p1"},
    ),
    (
        "list_checkpoints",
        ("s:train:0",),
        {"checkpoints": [CHECKPOINT]},
        "GET training_runs/s:train:0/checkpoints",
        {},
    ),
    (
        "list_user_checkpoints",
        (),
        {"checkpoints": [CHECKPOINT], "cursor": CURSOR},
        "GET checkpoints",
        {"limit": "100", "offset": "0"},
    ),
    (
        "delete_checkpoint",
        ("s:train:0", "weights/0001"),
        None,
        "DELETE training_runs/s:train:0/checkpoints/weights/0001",
        {},
    ),
    (
        "delete_checkpoint_from_tinker_path",
        (PATH,),
        None,
        "DELETE training_runs/s:train:0/checkpoints/weights/0001",
        {},
    ),
    ("get_weights_info_by_tinker_path", (PATH,), WEIGHTS, "POST weights_info", {}),
    ("get_session", ("s",), {"training_run_ids": ["s:train:0"], "sampler_ids": []}, "GET sessions/s", OWNED),
    ("list_sessions", (), {"sessions": ["s"]}, "GET sessions", {"limit": "20", "offset": "0", **OWNED}),
    (
        "get_sampler",
        ("s:sample:0",),
        {"sampler_id": "s:sample:0", "base_model": "toy"},
        "GET samplers/s:sample:0",
        {},
    ),
    ("get_health", (), {"status": "ok"}, "GET healthz", {}),
]


@pytest.mark.parametrize(
    ("name", "arguments", "answer", "target", "query"), METHODS, ids=lambda m: str(m)[:30]
)
def test_every_method_sends_its_request_and_reads_its_answer(
    name: str, arguments: tuple[Any, ...], answer: Any, target: str, query: dict[str, str]
) -> None:
    transport = MockTransport(lambda _: reply(answer))
    rest = RestClient(transport=transport)
    future = getattr(rest, name)(*arguments)
    assert isinstance(future, concurrent.futures.Future | APIFuture)
    value = future.result(timeout=10)
    again = asyncio.run(getattr(rest, f"{name}_async")(*arguments))
    assert value == again
    assert (value is None) == (answer is None)
    for request in transport.requests:
        assert f"{request.method} {request.path.removeprefix('/api/v1/')}" == target
        assert request.query == query
    assert len(transport.requests) == 2


def test_dates_and_nested_values_are_read() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply(RUN)))
    run = rest.get_training_run("s:train:0").result(timeout=10)
    assert isinstance(run, types.TrainingRun)
    assert run.last_request_time.year == 2026
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == PATH


def test_wrong_arguments_are_said_at_the_call() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply(RUN)))
    with pytest.raises(ValueError, match="tinker://"):
        rest.get_training_run_by_tinker_path("weights/1")
    with pytest.raises(ValueError, match="access_scope"):
        rest.get_training_run("r", "mine").result(timeout=10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit"):
        rest.list_sessions(limit=-1).result(timeout=10)


def test_an_unknown_object_is_a_not_found_error() -> None:
    rest = RestClient(transport=MockTransport(lambda _: reply({"detail": "no run r"}, status=404)))
    with pytest.raises(NotFoundError, match="no run r"):
        rest.get_training_run("r").result(timeout=10)


def test_a_rest_client_of_a_service_shares_its_connections() -> None:
    transport = MockTransport(lambda _: reply({"sessions": []}))
    rest = ServiceClient(transport=transport).create_rest_client()
    rest.list_sessions().result(timeout=10)
    assert transport.requests[0].headers["x-sdk-method"] == "list_sessions"
