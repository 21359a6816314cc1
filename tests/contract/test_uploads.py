"""Uploads of weights and searches of checkpoints, as the documentation of 0.39 shows them, on every backend."""

from __future__ import annotations

import asyncio
import urllib.request
from datetime import UTC, datetime

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL, Backend
from tinkex import types

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::tinkex.errors.ExperimentalWarning")]

LORA = types.LoraConfig(rank=4)
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])


def put(url: str, content: bytes) -> None:
    """A PUT by a program of its own, without a key."""
    with urllib.request.urlopen(urllib.request.Request(url, content, method="PUT"), timeout=60) as answer:
        assert answer.status == 200


def exported(service: tinkex.ServiceClient) -> tuple[str, dict[str, bytes]]:
    """The sampler weights of a run, and its exported files."""
    training = service.create_lora_training_client(BASE_MODEL, rank=LORA.rank, seed=7)
    datum = types.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": [6, 7, 8, 9]})
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.05)).result()
    sampler = training.save_weights_for_sampler("before").result().path
    path = training.save_weights_external("out").result().path
    urls = service.create_rest_client().get_external_weights_urls(path).result().urls
    files = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=60) as answer:
            files[name] = answer.read()
    return sampler, files


@pytest.mark.backends(*WITH_A_MODEL)
def test_exported_weights_are_uploaded_and_sampled_with_the_same_numbers(
    service: tinkex.ServiceClient,
) -> None:
    sampler, files = exported(service)
    rest = service.create_rest_client()
    upload = rest.external_weights_upload_start(base_model=BASE_MODEL, lora_config=LORA).result()
    assert upload.expires > datetime.now(UTC)
    for name, url in upload.urls.items():
        put(url, files[name])
    path = rest.external_weights_upload_finish(upload.upload_id).result().tinker_path
    before, after = (
        service.create_sampling_client(model_path=each).compute_logprobs(PROMPT).result()
        for each in (sampler, path)
    )
    assert before == after
    training = service.create_training_client_from_state(path)
    assert training.get_info().lora_rank == LORA.rank
    named = service.create_sampling_client(base_model=f"{BASE_MODEL};{path}")
    assert named.compute_logprobs(PROMPT).result() == after
    request = types.CheckpointSearchRequest(checkpoint_type="external", base_models=[BASE_MODEL])
    (found,) = [one for one in rest.iter_search_checkpoints(request) if one.tinker_path == path]
    assert found.base_model == BASE_MODEL


@pytest.mark.backends(*WITH_A_MODEL)
def test_a_finished_upload_cannot_be_cancelled(service: tinkex.ServiceClient) -> None:
    _, files = exported(service)
    rest = service.create_rest_client()
    upload = rest.external_weights_upload_start(base_model=BASE_MODEL, lora_config=LORA).result()
    for name, url in upload.urls.items():
        put(url, files[name])
    path = rest.external_weights_upload_finish(upload.upload_id).result().tinker_path
    with pytest.raises(tinkex.ConflictError, match=path):
        rest.external_weights_upload_cancel(upload.upload_id).result(timeout=60)
    assert rest.external_weights_upload_finish(upload.upload_id).result().tinker_path == path


@pytest.mark.backends(*WITH_A_MODEL)
def test_an_asynchronous_program_uploads_without_blocking(service: tinkex.ServiceClient) -> None:
    _, files = exported(service)
    rest = service.create_rest_client()

    async def program() -> str:
        upload = await rest.external_weights_upload_start(base_model=BASE_MODEL, lora_config=LORA)
        await asyncio.gather(*(asyncio.to_thread(put, url, files[name]) for name, url in upload.urls.items()))
        finished = await rest.external_weights_upload_finish(upload.upload_id)
        return finished.tinker_path

    assert asyncio.run(program()).startswith("tinker://")


def test_an_upload_can_be_cancelled(backend: Backend) -> None:
    rest = backend.rest()
    upload = rest.external_weights_upload_start(base_model=BASE_MODEL, lora_config=LORA).result()
    assert set(upload.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    rest.external_weights_upload_cancel(upload.upload_id).result()
    with pytest.raises(tinkex.NotFoundError):
        rest.external_weights_upload_finish(upload.upload_id).result()


def test_searches_return_pages_and_iterators_every_checkpoint(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=2)
    saved = [training.save_state(f"n{number}").result().path for number in range(3)]
    rest = service.create_rest_client()
    request = types.CheckpointSearchRequest(checkpoint_type="training", limit=2)
    page = rest.search_checkpoints(request).result()
    assert [one.tinker_path for one in page.checkpoints] == saved[:0:-1]
    assert page.next_cursor is not None
    run = training.get_info().model_id
    found = [one.tinker_path for one in rest.iter_search_checkpoints(request) if one.training_run_id == run]
    assert found == saved[::-1]

    async def program() -> list[str]:
        iterator = rest.iter_search_checkpoints_async(request)
        return [one.tinker_path async for one in iterator if one.training_run_id == run]

    assert asyncio.run(program()) == found
