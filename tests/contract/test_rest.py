"""The contract of a REST client on every backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, Backend
from tinkex import types

ITERATORS: list[tuple[str, dict[str, Any], Callable[[Any], str]]] = [
    ("iter_training_runs", {"page_size": 2}, lambda run: str(run.training_run_id)),
    ("iter_user_checkpoints", {"page_size": 2}, lambda checkpoint: str(checkpoint.tinker_path)),
    ("iter_sessions", {"page_size": 2}, str),
    (
        "iter_search_sessions",
        {"request": types.SessionSearchRequest(limit=2)},
        lambda session: str(session.session_id),
    ),
]


@pytest.fixture
def rest(backend: Backend) -> tinkex.RestClient:
    return backend.rest()


def make_three(backend: Backend) -> dict[str, set[str]]:
    """Three sessions, each with a run and a checkpoint."""
    made: dict[str, set[str]] = {"runs": set(), "checkpoints": set(), "sessions": set()}
    for _ in range(3):
        with backend.service() as service:
            training = service.create_lora_training_client(BASE_MODEL, rank=2)
            made["runs"].add(training.model_id)
            made["checkpoints"].add(training.save_state("one").result(60).path)
            made["sessions"].add(service.holder.get_session_id())
    return made


@pytest.mark.filterwarnings("ignore::tinkex.errors.ExperimentalWarning")
def test_iterators_return_all_entries_page_by_page(backend: Backend, rest: tinkex.RestClient) -> None:
    made = make_three(backend)
    expected = [made["runs"], made["checkpoints"], made["sessions"], made["sessions"]]
    for (name, options, id_of), wanted in zip(ITERATORS, expected, strict=True):
        iterator: Iterator[Any] = getattr(rest, name)(**options)
        found = [id_of(item) for item in iterator]
        assert wanted <= set(found), name
        assert len(found) == len(set(found)), f"{name} named something twice"

        async def collect(name: str = name, options: Any = options, id_of: Any = id_of) -> list[str]:
            items: AsyncIterator[Any] = getattr(rest, f"{name}_async")(**options)
            return [id_of(item) async for item in items]

        assert asyncio.run(collect()) == found, name


def test_pages_have_the_requested_size(backend: Backend, rest: tinkex.RestClient) -> None:
    make_three(backend)
    first = rest.list_training_runs(limit=2).result(30)
    second = rest.list_training_runs(limit=1, offset=2).result(30)
    assert (len(first.training_runs), len(second.training_runs)) == (2, 1)
    ids = [run.training_run_id for run in (*first.training_runs, *second.training_runs)]
    assert len(set(ids)) == 3
    assert first.cursor.total_count >= 3


def test_a_checkpoint_is_published_and_withdrawn(
    service: tinkex.ServiceClient, rest: tinkex.RestClient
) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=2)
    path = training.save_state("shown").result(60).path

    def is_public() -> bool:
        (checkpoint,) = rest.list_checkpoints(training.model_id).result(30).checkpoints
        return checkpoint.public

    assert not is_public()
    rest.publish_checkpoint_from_tinker_path(path).result(30)
    assert is_public()
    rest.unpublish_checkpoint_from_tinker_path(path).result(30)
    assert not is_public()


def test_the_expiry_of_a_checkpoint_can_be_set_and_removed(
    service: tinkex.ServiceClient, rest: tinkex.RestClient
) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=2)
    path = training.save_state("short").result(60).path

    def expires_at() -> datetime | None:
        (checkpoint,) = rest.iter_checkpoints(training.model_id)
        return checkpoint.expires_at

    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(30)
    expires = expires_at()
    assert expires is not None
    assert timedelta(hours=1) < expires - datetime.now(UTC) < timedelta(hours=3)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(30)
    assert expires_at() is None


def test_a_client_without_a_session_reads_the_capabilities(rest: tinkex.RestClient) -> None:
    assert BASE_MODEL in rest.get_server_capabilities().result().model_names()


def test_a_session_names_what_belongs_to_it(service: tinkex.ServiceClient, rest: tinkex.RestClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=2)
    sampler = training.save_weights_and_get_sampling_client()
    session = rest.get_session(service.holder.get_session_id()).result(30)
    assert session.training_run_ids == [training.model_id]
    assert sampler._sampling_session_id in session.sampler_ids
    assert rest.get_sampler(sampler._sampling_session_id).result(30).base_model == BASE_MODEL


def test_weights_say_what_they_belong_to(service: tinkex.ServiceClient, rest: tinkex.RestClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=2)
    path = training.save_state("info").result(60).path
    info = rest.get_weights_info_by_tinker_path(path).result(30)
    assert (info.base_model, info.is_lora, info.lora_rank) == (BASE_MODEL, True, 2)
    run = rest.get_training_run_by_tinker_path(path).result(30)
    assert run.training_run_id == training.model_id


def test_what_is_not_there_is_not_found(service: tinkex.ServiceClient, rest: tinkex.RestClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=2)
    nowhere = f"tinker://{training.model_id}/weights/nowhere"
    for call in (
        lambda: rest.get_training_run("nobody:train:0"),
        lambda: rest.delete_checkpoint_from_tinker_path(nowhere),
        lambda: rest.publish_checkpoint_from_tinker_path(nowhere),
        lambda: rest.set_checkpoint_ttl_from_tinker_path(nowhere, 3600),
        lambda: rest.get_weights_info_by_tinker_path(nowhere),
    ):
        with pytest.raises(tinkex.NotFoundError):
            call().result(30)  # type: ignore[attr-defined]
