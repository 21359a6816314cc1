"""Choose the tokenizer yourself, around a sample.

You will see where tokenizers of some model names come from (all Llama 3 models share a copy without a licence
gate), the model's own tokenizer and the one you chose encode a text, and a sample decoded with yours. Choose
by TOKENIZER: a directory or a name on the hub; without it, the model's own serves for both.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types
from tinkex.tokenizers import get_tokenizer, hub_name

NAMES = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B:peft:32768", "moonshotai/Kimi-K2-Thinking")
TEXT = "Tokenizers cut text into pieces."


def main() -> None:
    for name in NAMES:
        print(f"{name} → {hub_name(name)}")
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        own = sampler.get_tokenizer()
        chosen = get_tokenizer(os.environ["TOKENIZER"]) if os.environ.get("TOKENIZER") else own

        tokens = chosen.encode(TEXT)
        print(f"chosen: {len(tokens)} tokens, {tokens[:6]} …; back again: {chosen.decode(tokens)!r}")
        same = own.encode(TEXT) == tokens
        print(f"the model's own gives {'the same' if same else 'others: its samples will look odd'}")

        # A sampler only sees token ids; which tokenizer made them is your choice.
        params = types.SamplingParams(max_tokens=8, temperature=0.0)
        answer = sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result().sequences[0]
        print(f"goes on, read by the chosen one: {chosen.decode(answer.tokens)!r}")


if __name__ == "__main__":
    main()
