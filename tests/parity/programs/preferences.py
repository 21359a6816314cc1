"""Preferences: a DPO loss of one's own over pairs, then a loss that the server runs where it can."""

import asyncio

import tinker
import torch
from tinker import types

BETA = 0.1


def sequence(tokens):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0.0] + [1.0] * (len(tokens) - 2)},
    )


async def reference_logprobs(sampler, data):
    whole = [one.model_input.append_int(one.loss_fn_inputs["target_tokens"].data[-1]) for one in data]
    found = await asyncio.gather(*(sampler.compute_logprobs_async(one) for one in whole))
    return [torch.tensor(logprobs[1:]) for logprobs in found]


def dpo(references):
    def loss(data, logprobs):
        def score(place):
            weights = data[place].loss_fn_inputs["weights"].to_torch()
            return (weights * (logprobs[place] - references[place])).sum()

        margins = torch.stack([score(place) - score(place + 1) for place in range(0, len(data), 2)])
        losses = -torch.nn.functional.logsigmoid(BETA * margins)
        return losses.sum(), {
            "dpo/margin": margins.mean().item(),
            "dpo/accuracy": (margins > 0).float().mean().item(),
        }

    return loss


def weighted(logprobs, weights):
    nll = -(logprobs * weights).sum()
    return nll + 0.01 * (logprobs**2).mean(), {"custom/nll:sum": nll, "custom/lp:mean": logprobs.mean()}


async def train(service, base_model):
    training = await service.create_lora_training_client_async(base_model, rank=4, seed=9)
    sampler = await service.create_sampling_client_async(base_model=base_model)
    data = [sequence([(13 * place + 7 * one) % 300 + 5 for place in range(10)]) for one in range(4)]
    references = await reference_logprobs(sampler, data)
    curve = []
    for _ in range(3):
        passed = await training.forward_backward_custom_async(data, dpo(references))
        await (await training.optim_step_async(types.AdamParams(learning_rate=1e-2)))
        curve.append((await passed).metrics)
    handle = await service.create_custom_loss(weighted, {"logprobs": 1, "weights": 1})
    for _ in range(2):
        passed = await training.forward_backward_custom_async(data, handle)
        await (await training.optim_step_async(types.AdamParams(learning_rate=1e-2)))
        curve.append((await passed).metrics)
    output = await (await training.forward_async(data, "cross_entropy"))
    return {
        "curve": [sorted(metrics.items()) for metrics in curve],
        "after": [one["logprobs"].tolist() for one in output.loss_fn_outputs],
        "on_the_server": handle.loss_id is not None,
        "handle": (handle.name, handle.input_names, handle.key),
    }


def main():
    with tinker.ServiceClient() as service:
        base_model = service.get_server_capabilities().supported_models[0].model_name
        return asyncio.run(train(service, base_model))
