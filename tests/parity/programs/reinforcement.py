"""Reinforcement learning: groups of rollouts from the newest weights, centred rewards, importance sampling."""

import asyncio

import tinker
from tinker import types

GROUP, ITERATIONS = 4, 3


def reward(tokens):
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


async def rollouts(sampler, prompt, seed):
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=seed, stop=[])
    result = await sampler.sample_async(prompt=prompt, num_samples=GROUP, sampling_params=params)
    return [(sequence.tokens, sequence.logprobs) for sequence in result.sequences]


def rollout_datum(prompt, tokens, logprobs, advantage):
    whole = prompt.to_ints() + tokens
    ahead = prompt.length - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": whole[1:],
            "logprobs": [0.0] * ahead + logprobs,
            "advantages": [0.0] * ahead + [advantage] * len(tokens),
        },
    )


async def train(service, base_model):
    training = await service.create_lora_training_client_async(base_model=base_model, rank=4, seed=5)
    prompts = [types.ModelInput.from_ints([10 + i, 20 + i, 30 + i]) for i in range(3)]
    history = []
    for iteration in range(ITERATIONS):
        sampler = await training.save_weights_and_get_sampling_client_async()
        groups = await asyncio.gather(
            *(rollouts(sampler, prompt, seed=100 * iteration + place) for place, prompt in enumerate(prompts))
        )
        data, rewards = [], []
        for prompt, group in zip(prompts, groups, strict=True):
            scores = [reward(tokens) for tokens, _ in group]
            rewards += scores
            mean = sum(scores) / len(scores)
            for (tokens, logprobs), score in zip(group, scores, strict=True):
                data.append(rollout_datum(prompt, tokens, logprobs, score - mean))
        passed = await training.forward_backward_async(data, "importance_sampling")
        stepped = await training.optim_step_async(types.AdamParams(learning_rate=1e-2))
        output = await passed.result_async()
        await stepped
        history.append(
            (sum(rewards) / len(rewards), output.metrics["loss:sum"], [t for g in groups for t, _ in g])
        )
    return history


def main():
    service = tinker.ServiceClient()
    base_model = service.get_server_capabilities().supported_models[0].model_name
    history = asyncio.run(train(service, base_model))
    service.close("success").result()
    return {"history": history}
