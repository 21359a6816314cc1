"""Programs for 0.36 and for 0.38 of the official SDK, checked by mypy --strict and basedpyright in scripts/check; never run.

Every method that creates a client or returns a value is used directly, with ``result()``, with ``await``, and as a coroutine
or a ``concurrent.futures.Future``.
"""
# pyright: strict

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import assert_type

import tinkex
from tinkex import types

PROMPT = types.ModelInput.from_ints([1, 2])
PARAMS = types.SamplingParams(max_tokens=4)


def takes_training(client: tinkex.TrainingClient) -> None: ...


def takes_sampling(client: tinkex.SamplingClient) -> None: ...


def takes_future(future: tinkex.APIFuture[tinkex.TrainingClient]) -> None: ...


def used_directly(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client("model", rank=8)
    takes_training(training)
    takes_future(training)
    takes_sampling(service.create_sampling_client(base_model="model"))
    takes_sampling(training.create_sampling_client("tinker://run/weights/1"))
    sampler = training.save_weights_and_get_sampling_client()
    assert_type(sampler.sample(PROMPT, 1, PARAMS).result(), types.SampleResponse)
    assert_type(sampler.get_base_model().upper(), str)
    assert_type(training.get_info().model_data.model_name, str | None)
    assert_type(service.get_server_capabilities().supported_models, list[types.SupportedModel])
    assert_type(training.get_tokenizer().encode("text"), list[int])
    assert_type(service.get_console_url().startswith("https"), bool)


def with_result(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client("model").result()
    assert_type(training, tinkex.TrainingClient)
    assert_type(
        service.create_training_client_from_state("tinker://r/weights/1").result(), tinkex.TrainingClient
    )
    assert_type(service.create_training_client_from_state_with_optimizer("tinker://r/weights/1").result(timeout=5), tinkex.TrainingClient)  # fmt: skip
    sampler = training.save_weights_and_get_sampling_client().result()
    assert_type(sampler, tinkex.SamplingClient)
    assert_type(sampler.get_base_model().result(), str)
    assert_type(training.get_info().result(), types.GetInfoResponse)
    assert_type(service.get_server_capabilities().result(), types.GetServerCapabilitiesResponse)
    assert_type(service.create_rest_client().result(), tinkex.RestClient)
    assert_type(training.unload().result(), types.UnloadModelResponse)


async def awaited(service: tinkex.ServiceClient, admin: tinkex.AdminClient) -> None:
    training = await service.create_lora_training_client("model")
    assert_type(training, tinkex.TrainingClient)
    assert_type(await training.forward_backward([], "cross_entropy"), types.ForwardBackwardOutput)
    assert_type(await training.optim_step(types.AdamParams()), types.OptimStepResponse)
    assert_type(await training.unload(), types.UnloadModelResponse)
    assert_type((await training.save_weights_for_sampler("step")).path, str)
    assert_type((await training.save_weights_external("step")).path, str)
    sampler = await training.save_weights_and_get_sampling_client()
    assert_type(sampler, tinkex.SamplingClient)
    assert_type(await sampler.sample(PROMPT, 1, PARAMS), types.SampleResponse)
    assert_type(await sampler.compute_logprobs(PROMPT), list[float | None])
    assert_type(await sampler.get_base_model(), str)
    assert_type(await training.get_info(), types.GetInfoResponse)
    assert_type(await service.get_server_capabilities(), types.GetServerCapabilitiesResponse)
    rest = await service.create_rest_client()
    assert_type(rest, tinkex.RestClient)
    assert_type(await rest.list_sessions(), types.ListSessionsResponse)
    request = types.CheckpointSearchRequest(owner=types.UserSearchOwner(owner_urns=["user"]))
    assert_type(await rest.search_checkpoints(request), types.CheckpointSearchResponse)
    async for checkpoint in rest.iter_search_checkpoints(request):
        assert_type(checkpoint.base_model, str | None)
    upload = await rest.external_weights_upload_start(
        base_model="model", lora_config=types.LoraConfig(rank=4)
    )
    assert_type(upload, types.ExternalWeightsUploadStartResult)
    assert_type((await rest.external_weights_upload_finish(upload.upload_id)).tinker_path, str)
    assert_type(await admin.get_audit_log(), types.AuditLogResponse)


async def as_coroutines_and_futures(service: tinkex.ServiceClient) -> None:
    creating = service.create_lora_training_client("model")
    assert_type(await asyncio.create_task(creating.coroutine()), tinkex.TrainingClient)
    assert_type(creating.future(), concurrent.futures.Future[tinkex.TrainingClient])
    sampler = await service.create_sampling_client(base_model="model")
    first, second = await asyncio.gather(sampler.sample(PROMPT, 1, PARAMS), sampler.sample(PROMPT, 1, PARAMS))
    assert_type(first, types.SampleResponse)
    assert_type(second, types.SampleResponse)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(sampler.sample(PROMPT, 1, PARAMS).coroutine())
    assert_type(task.result(), types.SampleResponse)
    sampler.sample(PROMPT, 1, PARAMS).future().add_done_callback(lambda done: print(done.result().sequences))
    waited = concurrent.futures.wait([sampler.sample(PROMPT, 1, PARAMS)])
    assert_type(next(iter(waited.done)).result(), types.SampleResponse)
    assert_type(await asyncio.wrap_future(sampler.sample(PROMPT, 1, PARAMS)), types.SampleResponse)
