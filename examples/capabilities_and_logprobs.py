"""Ask a server how it is and what it offers, and a model how likely a sentence is.

You will see the server's health, its models with their context lengths, every token of a sentence with its
logprob given those before it, and the likeliest alternatives at the last position.
"""

from __future__ import annotations

import math
import os

import tinkex
from tinkex import types

SENTENCE = "The capital of France is Paris"


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        print("health:", service.create_rest_client().get_health().result().status)
        offered = service.get_server_capabilities().supported_models
        for one in offered:
            print(f"model:  {one.model_name}, context of {one.max_context_length or 'unsaid'} tokens")
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name

        sampler = service.create_sampling_client(base_model=model)
        tokenizer = sampler.get_tokenizer()
        tokens = tokenizer.encode(SENTENCE)
        prompt = types.ModelInput.from_ints(tokens)

        logprobs = sampler.compute_logprobs(prompt).result()
        for token, logprob in zip(tokens, logprobs, strict=True):
            shown = "      (nothing before it)" if logprob is None else f"{logprob:8.3f}"
            print(f"  {tokenizer.decode([token])!r:12} {shown}")
        known = [logprob for logprob in logprobs if logprob is not None]
        print(f"perplexity {math.exp(-sum(known) / len(known)):.1f}")

        # The same pass can say what else the model would have found likely, at every position.
        answer = sampler.sample(
            prompt,
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        ).result()
        for token, logprob in answer.topk_prompt_logprobs[-1]:
            print(
                f"instead of {tokenizer.decode(tokens[-1:])!r}: {tokenizer.decode([token])!r} {logprob:.3f}"
            )


if __name__ == "__main__":
    main()
