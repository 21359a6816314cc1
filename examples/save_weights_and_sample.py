"""Sample from snapshots of the weights during training.

You will see the logprob of a sentence under two snapshots, before and after training; that the first snapshot
is unchanged by the training; and a completion from the second.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types

SENTENCE = "My favourite colour is ultramarine."


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=8, seed=0)
        before = training.save_weights_and_get_sampling_client()
        tokenizer = before.get_tokenizer()  # of the sampler's base model
        tokens = tokenizer.encode(SENTENCE)
        text = types.ModelInput.from_ints(tokens)

        def logprob(sampler: tinkex.SamplingClient) -> float:
            return sum(sampler.compute_logprobs(text).result()[1:])

        print(f"first snapshot, before training   {logprob(before):9.3f}")
        batch = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
        for _ in range(6):
            training.forward_backward(batch, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=5e-4))
        # No need to wait: the snapshot includes all operations submitted before it.
        after = training.save_weights_and_get_sampling_client()
        print(f"second snapshot                   {logprob(after):9.3f}")
        print(f"first snapshot, after training    {logprob(before):9.3f}")

        start = types.ModelInput.from_ints(tokens[: len(tokens) // 2])
        params = types.SamplingParams(max_tokens=8, temperature=0.0)
        answer = after.sample(start, 1, params).result().sequences[0]
        print(f"{tokenizer.decode(start.to_ints())!r} → {tokenizer.decode(answer.tokens)!r}")


if __name__ == "__main__":
    main()
