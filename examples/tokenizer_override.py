"""Sample with a tokenizer of your choice.

You will see the hub names of the tokenizers of some models (all Llama 3 models share a copy without a licence
gate), a text encoded with the model's own and the chosen tokenizer, and a sample decoded with the chosen one. Set
TOKENIZER to a directory or a hub name; the default is the model's own tokenizer.
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
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        own = sampler.get_tokenizer()
        chosen = get_tokenizer(os.environ["TOKENIZER"]) if os.environ.get("TOKENIZER") else own

        tokens = chosen.encode(TEXT)
        print(f"chosen: {len(tokens)} tokens, {tokens[:6]} …; decoded: {chosen.decode(tokens)!r}")
        same = own.encode(TEXT) == tokens
        print(f"the model's own: {'the same tokens' if same else 'other tokens, so samples will look wrong'}")

        # A sampler receives only token ids, so any tokenizer can encode the prompt.
        params = types.SamplingParams(max_tokens=8, temperature=0.0)
        answer = sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result().sequences[0]
        print(f"completion, decoded with the chosen one: {chosen.decode(answer.tokens)!r}")


if __name__ == "__main__":
    main()
