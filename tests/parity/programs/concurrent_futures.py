"""Futures as programs use them: from several threads, twice, with as_completed, wrapped, timed out, gathered."""

import asyncio
import concurrent.futures

import tinker
from tinker import types

GREEDY = types.SamplingParams(max_tokens=3, temperature=0.0)


def batch(seed):
    tokens = [(7 * seed + 3 * place) % 300 + 5 for place in range(10)]
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})


async def awaited_twice(training):
    future = await training.forward_backward_async([batch(2)], "cross_entropy")
    first, second = await future, await future.result_async()
    return first.metrics == second.metrics


async def mixed(sampler, prompt):
    wrapped = asyncio.wrap_future(sampler.sample(prompt, 1, GREEDY))
    task = asyncio.create_task(sampler.sample_async(prompt, 1, GREEDY))
    answers = await asyncio.wait_for(asyncio.gather(wrapped, task), 60)
    try:
        await asyncio.wait_for(sampler.sample_async(prompt, 1, types.SamplingParams(max_tokens=200)), 0.001)
    except TimeoutError:
        return [answer.sequences[0].tokens for answer in answers]


def main():
    with tinker.ServiceClient() as service:
        base_model = service.get_server_capabilities().supported_models[0].model_name
        training = service.create_lora_training_client(base_model, rank=4, seed=1)
        passed = training.forward_backward((datum for datum in [batch(1)]), "cross_entropy")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            losses = list(pool.map(lambda _: passed.result().metrics["loss:sum"], range(4)))
        sampler = training.save_weights_and_get_sampling_client()
        prompts = [types.ModelInput.from_ints([5 + place, 6]) for place in range(6)]
        futures = [sampler.sample(prompt, 1, GREEDY) for prompt in prompts]
        finished = [f.result().sequences[0].tokens for f in concurrent.futures.as_completed(futures)]
        called = []
        futures[0].add_done_callback(lambda _: called.append("done"))
        try:
            training.forward_backward([batch(seed) for seed in range(8)], "cross_entropy").result(
                timeout=0.0001
            )
            late = "in time"
        except TimeoutError:
            late = "TimeoutError"
        return {
            "losses": losses,
            "twice": asyncio.run(awaited_twice(training)),
            "finished": sorted(finished),
            "states": [futures[0].done(), futures[0].cancelled(), futures[0].exception() is None, called],
            "mixed": asyncio.run(mixed(sampler, prompts[0])),
            "late": late,
        }
