"""The next batch is on its way while the last one runs; every step in an event loop, results gathered late."""

import asyncio

import tinker
from tinker.lib.public_interfaces import APIFuture

AHEAD = 3


def batch(step):
    tokens = [(7 * step + 3 * place) % 300 + 5 for place in range(13)]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput(
                chunks=[
                    tinker.EncodedTextChunk(tokens=tokens[:5]),
                    *(tinker.EncodedTextChunk(tokens=[token]) for token in tokens[5:-1]),
                ]
            ),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
    ]


async def train(training, steps):
    waiting, losses = [], []
    for step in range(steps):
        passed = await training.forward_backward_async(batch(step), "cross_entropy")
        assert isinstance(passed, APIFuture)
        waiting.append((passed, await training.optim_step_async(tinker.AdamParams(learning_rate=1e-2))))
        if len(waiting) > AHEAD:
            oldest, stepped = waiting.pop(0)
            losses.append((await oldest).metrics["loss:sum"])
            await stepped
    for passed, stepped in waiting:
        losses.append((await passed).metrics["loss:sum"])
        await stepped
    return losses


def main():
    with tinker.ServiceClient() as service:
        base_model = service.get_server_capabilities().supported_models[0].model_name
        training = service.create_lora_training_client(base_model, rank=4, seed=2)
        # a new event loop each time, with plain calls between, as programs with a sync main do
        losses = asyncio.run(train(training, 5))
        losses.append(training.forward(batch(0), "cross_entropy").result().metrics["loss:sum"])
        losses += asyncio.run(train(training, 5))
        # several passes before one step add up
        for step in range(3):
            training.forward_backward(batch(step), "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        losses.append(training.forward(batch(1), "cross_entropy").result().metrics["loss:sum"])
        return {"losses": losses, "rank": training.get_info().lora_rank}
