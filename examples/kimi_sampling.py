"""Sample from a Kimi K2 model with its own tokenizer, if the server has one.

You will see the server's models, a round trip through the tokenizer, and an answer. Without a Kimi model the
example stops after the list; set TINKER_BASE_URL to a server that has one.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types
from tinkex.tokenizers import hub_name

TEXT = "Kimi counts 12345 stars; 月亮很亮."


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        names = [model.model_name for model in service.get_server_capabilities().supported_models]
        print("models:", ", ".join(names))
        kimi = next((name for name in names if name.startswith("moonshotai/Kimi-K2")), None)
        if kimi is None:
            print("this server has no Kimi K2 model")
            return

        # Loaded from the server or from the hub, without running code from the hub.
        sampler = service.create_sampling_client(base_model=kimi)
        tokenizer = sampler.get_tokenizer()
        tokens = tokenizer.encode(TEXT)
        print(f"tokenizer of {hub_name(kimi)}: {type(tokenizer).__name__}")
        print(f"{len(tokens)} tokens, unchanged by the round trip: {tokenizer.decode(tokens) == TEXT}")

        chat = [{"role": "user", "content": "Say hi."}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        params = types.SamplingParams(max_tokens=12, temperature=0.6, seed=1)
        answer = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]
        print(f"answer of {kimi}: {tokenizer.decode(answer.tokens, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
