"""The programs in the style of 0.36: values and clients come back directly, ``_async`` methods are awaited, training ones twice."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import tinkex as tinker
from tests.contract.generations.common import (
    ADAM,
    BASE_MODEL,
    GREEDY,
    datum,
    loss_of,
    prompt,
    squared,
    tokens_of,
)


def supervised(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    losses = []
    for step in range(3):
        output = client.forward_backward([datum(step)], "cross_entropy").result()
        client.optim_step(ADAM).result()
        losses.append(loss_of(output))
    return losses


def pipelined(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    passes, steps = [], []
    for step in range(3):
        passes.append(client.forward_backward([datum(step)], "cross_entropy"))
        steps.append(client.optim_step(adam_params=ADAM))
    return [loss_of(one.result()) for one in passes], [type(one.result()).__name__ for one in steps]


def custom_loss(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    return loss_of(client.forward_backward_custom([datum()], squared).result())


def two_runs(service: tinker.ServiceClient) -> Any:
    first = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    second = service.create_lora_training_client(BASE_MODEL, rank=2, seed=1)
    assert first.model_id != second.model_id
    return [client.get_info().lora_rank for client in (first, second)]


def sampling(service: tinker.ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    futures = [sampler.sample(prompt(5 + i), num_samples=1, sampling_params=GREEDY) for i in range(4)]
    return [tokens_of(future.result()) for future in futures]


def completed_first(service: tinker.ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    futures = {sampler.sample(prompt(5 + i), 1, GREEDY): i for i in range(4)}
    found = {futures[done]: tokens_of(done.result()) for done in concurrent.futures.as_completed(futures)}
    assert all(future.done() and future.exception() is None for future in futures)
    return sorted(found.items())


def logprobs(service: tinker.ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    first, *others = sampler.compute_logprobs(prompt()).result()
    return first, [round(value or 0.0, 3) for value in others]


def callbacks(service: tinker.ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    seen: concurrent.futures.Future[list[int]] = concurrent.futures.Future()
    future = sampler.sample(prompt(), 1, GREEDY)
    future.add_done_callback(lambda done: seen.set_result(tokens_of(done.result())))
    return seen.result(timeout=120)


def chained_callbacks(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    seen: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def trained(done: concurrent.futures.Future[Any]) -> None:
        client.optim_step(ADAM).future().add_done_callback(  # type: ignore[attr-defined]
            lambda step: seen.set_result((loss_of(done.result()), type(step.result()).__name__))
        )

    client.forward_backward([datum()], "cross_entropy").future().add_done_callback(trained)  # type: ignore[attr-defined]
    return seen.result(timeout=120)


def threads(service: tinker.ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model=BASE_MODEL)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(
            pool.map(lambda i: tokens_of(sampler.sample(prompt(5 + i), 1, GREEDY).result()), range(4))
        )


def resumed(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(ADAM)
    path = client.save_state("resumed").result().path
    again = service.create_training_client_from_state(path)
    exact = service.create_training_client_from_state_with_optimizer(path)
    return [loss_of(each.forward([datum()], "cross_entropy").result()) for each in (client, again, exact)]


def saved_sampler(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    path = client.save_weights_for_sampler("sampled").result().path
    both = service.create_sampling_client(model_path=path), client.create_sampling_client(path)
    return [tokens_of(sampler.sample(prompt(), 1, GREEDY).result()) for sampler in both]


def values(service: tinker.ServiceClient) -> Any:
    models = [model.model_name for model in service.get_server_capabilities().supported_models]
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    info = client.get_info()
    assert isinstance(info, tinker.types.GetInfoResponse)
    sampler = client.save_weights_and_get_sampling_client()
    return BASE_MODEL in models, info.lora_rank, info.model_data.model_name, sampler.get_base_model().upper()


def managed(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    path = client.save_state("managed").result().path
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_checkpoints(client.model_id).result().checkpoints
    return [one.checkpoint_id for one in listed], [one.checkpoint_id for one in left]


def rejected(service: tinker.ServiceClient) -> Any:
    names = []
    for create in (
        lambda: service.create_lora_training_client("no/such-model"),
        lambda: service.create_training_client_from_state("tinker://nobody/weights/none"),
        service.create_sampling_client,
    ):
        try:
            create()
        except (tinker.APIError, ValueError) as error:
            names.append(type(error).__name__)
    return names


async def supervised_async(service: tinker.ServiceClient) -> Any:
    client = await service.create_lora_training_client_async(BASE_MODEL, rank=4, seed=1)
    losses = []
    for step in range(3):
        backward = await client.forward_backward_async([datum(step)], "cross_entropy")
        optim = await client.optim_step_async(ADAM)
        losses.append(loss_of(await backward.result_async()))
        await optim
    return losses, (await client.get_info_async()).lora_rank


async def rollouts(service: tinker.ServiceClient) -> Any:
    sampler = await service.create_sampling_client_async(base_model=BASE_MODEL)
    drawn = await asyncio.gather(*(sampler.sample_async(prompt(5 + i), 1, GREEDY) for i in range(4)))
    return [tokens_of(response) for response in drawn]


async def task_group(service: tinker.ServiceClient) -> Any:
    sampler = await service.create_sampling_client_async(base_model=BASE_MODEL)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sampler.sample_async(prompt(5 + i), 1, GREEDY)) for i in range(3)]
    wrapped = await asyncio.wrap_future(sampler.sample(prompt(8), 1, GREEDY))
    return [tokens_of(task.result()) for task in tasks], tokens_of(wrapped)


async def reinforcement(service: tinker.ServiceClient) -> Any:
    client = await service.create_lora_training_client_async(BASE_MODEL, rank=4, seed=1)
    found = []
    for step in range(2):
        sampler = await client.save_weights_and_get_sampling_client_async()
        drawn = await asyncio.gather(*(sampler.sample_async(prompt(5 + i), 1, GREEDY) for i in range(2)))
        backward = await client.forward_backward_async([datum(step)], "cross_entropy")
        optim = await client.optim_step_async(ADAM)
        found.append(([tokens_of(one) for one in drawn], loss_of(await backward)))
        await optim
    return found


def mixed(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    found: list[Any] = []
    for step in range(2):
        found.append(loss_of(client.forward_backward([datum(step)], "cross_entropy").result()))
        client.optim_step(ADAM).result()
        sampler = client.save_weights_and_get_sampling_client()
        found.append(tokens_of(asyncio.run(sampler.sample_async(prompt(), 1, GREEDY))))
    return found
