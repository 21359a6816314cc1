"""Read an answer while it is being written, and stop it in the middle.

You will see the answer appear token by token, what the stream says at its end, and a second stream that is
closed after five tokens: the server draws no more of it.
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
        chat = [{"role": "user", "content": "Tell me a story about the sea."}]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompt = types.ModelInput.from_ints(tokens)

        with sampler.sample_stream(prompt, 1, types.SamplingParams(max_tokens=40, seed=3)) as stream:
            for event in stream:
                if isinstance(event, types.SampledToken):
                    print(event.text or tokenizer.decode([event.token]), end="", flush=True)
                else:
                    how = "token by token" if event.streamed else "all at once"
                    print(f"\n[{event.num_tokens} tokens came {how}; ended by {event.stop_reasons[0]}]")

        # Leaving the block closes the stream, and closing it cancels what is left of the sample.
        with sampler.sample_stream(prompt, 1, types.SamplingParams(max_tokens=200, seed=5)) as stream:
            first = [next(stream).token for _ in range(5)]
        print(f"[stopped after {len(first)} tokens: {tokenizer.decode(first)!r}]")


if __name__ == "__main__":
    main()
