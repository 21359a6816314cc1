"""The programs in the style of 0.38 and 0.39: a call of the server returns an ``APIFuture``, which is awaited once or has ``result()``.

What a client has since it was created, such as ``get_info()``, is a plain value.
"""

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
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
    losses = []
    for step in range(3):
        output = client.forward_backward([datum(step)], "cross_entropy").result()
        client.optim_step(ADAM).result()
        losses.append(loss_of(output))
    return losses


def pipelined(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
    passes, steps = [], []
    for step in range(3):
        passes.append(client.forward_backward([datum(step)], "cross_entropy").future())
        steps.append(client.optim_step(ADAM).future())
    concurrent.futures.wait([*passes, *steps])
    return [loss_of(one.result()) for one in passes], [type(one.result()).__name__ for one in steps]


async def custom_loss(service: tinker.ServiceClient) -> Any:
    client = await service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    return loss_of(await client.forward_backward_custom([datum()], squared))


async def two_runs(service: tinker.ServiceClient) -> Any:
    first, second = await asyncio.gather(
        service.create_lora_training_client(BASE_MODEL, rank=4, seed=1),
        service.create_lora_training_client(BASE_MODEL, rank=2, seed=1),
    )
    assert first.model_id != second.model_id
    return [client.get_info().lora_rank for client in (first, second)]


def sampling(service: tinker.ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    futures = [sampler.sample(prompt(5 + i), num_samples=1, sampling_params=GREEDY) for i in range(4)]
    return [tokens_of(future.result()) for future in futures]


def completed_first(service: tinker.ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    futures = {sampler.sample(prompt(5 + i), 1, GREEDY).future(): i for i in range(4)}
    found = {futures[done]: tokens_of(done.result()) for done in concurrent.futures.as_completed(futures)}
    return sorted(found.items())


async def logprobs(service: tinker.ServiceClient) -> Any:
    sampler = await service.create_sampling_client(base_model=BASE_MODEL)
    first, *others = await sampler.compute_logprobs(prompt())
    return first, [round(value or 0.0, 3) for value in others]


def callbacks(service: tinker.ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    seen: concurrent.futures.Future[list[int]] = concurrent.futures.Future()
    future = sampler.sample(prompt(), 1, GREEDY).future()
    future.add_done_callback(lambda done: seen.set_result(tokens_of(done.result())))
    return seen.result(timeout=120)


def chained_callbacks(service: tinker.ServiceClient) -> Any:
    seen: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def trained(client: tinker.TrainingClient, done: concurrent.futures.Future[Any]) -> None:
        client.optim_step(ADAM).future().add_done_callback(
            lambda step: seen.set_result((loss_of(done.result()), type(step.result()).__name__))
        )

    def created(done: concurrent.futures.Future[tinker.TrainingClient]) -> None:
        client = done.result()
        passing = client.forward_backward([datum()], "cross_entropy").future()
        passing.add_done_callback(lambda finished: trained(client, finished))

    service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).future().add_done_callback(created)
    return seen.result(timeout=120)


def threads(service: tinker.ServiceClient) -> Any:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()

    def draw(i: int) -> list[int]:
        async def main() -> list[int]:
            return tokens_of(await sampler.sample(prompt(5 + i), 1, GREEDY))

        return asyncio.run(main())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(draw, range(4)))


def resumed(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(ADAM)
    path = client.save_state("resumed").result().path
    again = service.create_training_client_from_state(path).result()
    exact = service.create_training_client_from_state_with_optimizer(path).result()
    return [loss_of(each.forward([datum()], "cross_entropy").result()) for each in (client, again, exact)]


async def saved_sampler(service: tinker.ServiceClient) -> Any:
    client = await service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    path = (await client.save_weights_for_sampler("sampled")).path
    both = await service.create_sampling_client(model_path=path), await client.create_sampling_client(path)
    return [tokens_of(await sampler.sample(prompt(), 1, GREEDY)) for sampler in both]


async def values(service: tinker.ServiceClient) -> Any:
    capabilities = await service.create_rest_client().get_server_capabilities()
    models = [model.model_name for model in capabilities.supported_models]
    client = await service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    info = client.get_info()
    sampler = await client.save_weights_and_get_sampling_client()
    name = sampler.get_base_model()
    return BASE_MODEL in models, info.lora_rank, info.model_data.model_name, name.upper()


async def managed(service: tinker.ServiceClient) -> Any:
    client = await service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    path = (await client.save_state("managed")).path
    rest = service.create_rest_client()
    listed = (await rest.list_checkpoints(client.model_id)).checkpoints
    await rest.delete_checkpoint_from_tinker_path(path)
    left = (await rest.list_checkpoints(client.model_id)).checkpoints
    return [one.checkpoint_id for one in listed], [one.checkpoint_id for one in left]


async def rejected(service: tinker.ServiceClient) -> Any:
    names = []
    for create in (
        lambda: service.create_lora_training_client("no/such-model"),
        lambda: service.create_training_client_from_state("tinker://nobody/weights/none"),
        service.create_sampling_client,
    ):
        try:
            await create()
        except (tinker.APIError, ValueError) as error:
            names.append(type(error).__name__)
    return names


async def supervised_async(service: tinker.ServiceClient) -> Any:
    client = await service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    losses = []
    for step in range(3):
        backward = client.forward_backward([datum(step)], "cross_entropy")
        optim = client.optim_step(ADAM)
        losses.append(loss_of(await backward))
        await optim
    return losses, client.get_info().lora_rank


async def rollouts(service: tinker.ServiceClient) -> Any:
    sampler = await service.create_sampling_client(base_model=BASE_MODEL)
    drawn = await asyncio.gather(*(sampler.sample(prompt(5 + i), 1, GREEDY) for i in range(4)))
    return [tokens_of(response) for response in drawn]


async def task_group(service: tinker.ServiceClient) -> Any:
    sampler = await service.create_sampling_client(base_model=BASE_MODEL)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sampler.sample(prompt(5 + i), 1, GREEDY).coroutine()) for i in range(3)]
    wrapped = await asyncio.wrap_future(sampler.sample(prompt(8), 1, GREEDY).future())
    return [tokens_of(task.result()) for task in tasks], tokens_of(wrapped)


async def reinforcement(service: tinker.ServiceClient) -> Any:
    client = await service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    found = []
    for step in range(2):
        sampler = await client.save_weights_and_get_sampling_client()
        drawn = await asyncio.gather(*(sampler.sample(prompt(5 + i), 1, GREEDY) for i in range(2)))
        backward = client.forward_backward([datum(step)], "cross_entropy")
        optim = client.optim_step(ADAM)
        found.append(([tokens_of(one) for one in drawn], loss_of(await backward)))
        await optim
    return found


def mixed(service: tinker.ServiceClient) -> Any:
    client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
    found: list[Any] = []
    for step in range(2):
        found.append(loss_of(client.forward_backward([datum(step)], "cross_entropy").result()))
        client.optim_step(ADAM).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        found.append(tokens_of(asyncio.run(sampler.sample(prompt(), 1, GREEDY).coroutine())))
    return found
