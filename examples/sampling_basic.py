"""Sample several answers to a question from a base model.

You will see the rendered prompt, three answers sampled with a seed, and the stop reason and mean logprob of each.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        tokenizer = sampler.get_tokenizer()

        question = [{"role": "user", "content": "Name a fruit."}]
        tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        print(f"prompt for {model}, {len(tokens)} tokens:\n{tokenizer.decode(tokens)}")

        params = types.SamplingParams(max_tokens=16, temperature=0.7, top_p=0.9, seed=1)
        # sample returns a future immediately; result() waits for it.
        response = sampler.sample(types.ModelInput.from_ints(tokens), 3, params).result()
        for number, sequence in enumerate(response.sequences, 1):
            mean = sum(sequence.logprobs) / len(sequence.logprobs)
            print(f"answer {number} ({sequence.stop_reason}, {mean:.2f} nats per token):")
            print(f"  {tokenizer.decode(sequence.tokens, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
