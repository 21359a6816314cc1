"""Create clients and train with asyncio: concurrent runs on one event loop.

You will see two training runs and a sampler created concurrently, both runs trained concurrently with
different learning rates, the better one saved, and a third run started from it.
"""

from __future__ import annotations

import asyncio
import os

import tinkex
from tinkex import types

SENTENCE = "Two roads diverged in a yellow wood."


async def train(run: tinkex.TrainingClient, batch: list[types.Datum], learning_rate: float) -> float:
    for _ in range(3):
        # Calling the method submits the operation; awaiting the future it returns waits for the result.
        run.forward_backward(batch, "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=learning_rate))
    output = await run.forward(batch, "cross_entropy")
    loss = output.metrics["loss:sum"]
    print(f"learning rate {learning_rate}: loss {loss:.3f}")
    return loss


async def main() -> None:
    async with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = (await service.get_server_capabilities()).supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        slow, fast, sampler = await asyncio.gather(
            service.create_lora_training_client(model, rank=4, seed=0),
            service.create_lora_training_client(model, rank=4, seed=0),
            service.create_sampling_client(base_model=model),
        )
        print(f"created {slow.model_id}, {fast.model_id} and a sampler of {await sampler.get_base_model()}")

        tokens = (await slow.get_tokenizer()).encode(SENTENCE)
        batch = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
        losses = await asyncio.gather(train(slow, batch, 5e-4), train(fast, batch, 5e-3))

        better = slow if losses[0] < losses[1] else fast
        path = (await better.save_state("better")).path
        third = await service.create_training_client_from_state(path)
        output = await third.forward(batch, "cross_entropy")
        print(f"{third.model_id} starts from {path} at loss {output.metrics['loss:sum']:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
