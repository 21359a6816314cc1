"""Ask a base model a question and read its answers.

You will see the prompt as the model gets it, three answers drawn with a seed, and for each of them why it
ended and how likely its tokens were.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        tokenizer = sampler.get_tokenizer()

        question = [{"role": "user", "content": "Name a fruit."}]
        tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        print(f"{model} is asked, in {len(tokens)} tokens:\n{tokenizer.decode(tokens)}")

        params = types.SamplingParams(max_tokens=16, temperature=0.7, top_p=0.9, seed=1)
        # sample returns a future at once; result() waits for it.
        response = sampler.sample(types.ModelInput.from_ints(tokens), 3, params).result()
        for number, sequence in enumerate(response.sequences, 1):
            mean = sum(sequence.logprobs) / len(sequence.logprobs)
            print(f"answer {number} ({sequence.stop_reason}, {mean:.2f} nats per token):")
            print(f"  {tokenizer.decode(sequence.tokens, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
