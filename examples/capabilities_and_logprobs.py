"""Query a server's health and models, and compute the logprobs of a sentence.

You will see the server's health, its models with their architectures and context lengths, every token of a sentence with its
logprob, and the top-k alternatives at the last position.
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
        models = service.get_server_capabilities().supported_models
        for one in models:
            length = (
                f"{one.max_context_length} tokens" if one.max_context_length else "a length it does not state"
            )
            print(f"model:  {one.model_name} ({one.arch or 'unknown architecture'}), context of {length}")
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name

        sampler = service.create_sampling_client(base_model=model)
        tokenizer = sampler.get_tokenizer()
        tokens = tokenizer.encode(SENTENCE)
        prompt = types.ModelInput.from_ints(tokens)

        logprobs = sampler.compute_logprobs(prompt).result()
        for token, logprob in zip(tokens, logprobs, strict=True):
            formatted = "      (first token)" if logprob is None else f"{logprob:8.3f}"
            print(f"  {tokenizer.decode([token])!r:12} {formatted}")
        known = [logprob for logprob in logprobs if logprob is not None]
        print(f"perplexity {math.exp(-sum(known) / len(known)):.1f}")

        # The same pass can return the top-k tokens of every position.
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
