"""Train a LoRA adapter on one sentence, save it for sampling, and let it complete the sentence.

You will see the loss and duration of every step, the path of the saved weights, and completions of the
sentence's first words by the base model and by the adapter.
"""

from __future__ import annotations

import os
import time

import tinkex
from tinkex import types

SENTENCE = "The sky over Mars is butterscotch, and its sunsets are blue."
STEPS = 8


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=8, seed=0)
        tokenizer = training.get_tokenizer()

        # Position i of the input is trained to predict target i: the sentence, shifted by one.
        tokens = tokenizer.encode(SENTENCE)
        datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
        for step in range(1, STEPS + 1):
            start_time = time.monotonic()
            # Submit both operations before waiting for the first result.
            passed = training.forward_backward([datum], "cross_entropy")
            applied = training.optim_step(types.AdamParams(learning_rate=2e-3))
            loss = passed.result().metrics["loss:sum"] / len(tokens[1:])
            applied.result()
            print(f"step {step}/{STEPS}  loss per token {loss:.3f}  {time.monotonic() - start_time:.2f} s")

        saved = training.save_weights_for_sampler("mars").result()
        print("saved", saved.path)
        start = types.ModelInput.from_ints(tokens[: len(tokens) // 2])
        greedy = types.SamplingParams(max_tokens=len(tokens) - len(tokens) // 2, temperature=0.0)
        for name, sampler in (
            ("base model", service.create_sampling_client(base_model=model)),
            ("adapter", service.create_sampling_client(model_path=saved.path)),
        ):
            answer = sampler.sample(start, 1, greedy).result().sequences[0].tokens
            print(f"{name}: {tokenizer.decode(start.to_ints())!r} → {tokenizer.decode(answer)!r}")


if __name__ == "__main__":
    main()
