"""Stream an answer token by token, and cancel another one.

You will see the answer appear token by token, the summary at the end of the stream, and a second stream that is
closed after five tokens, which cancels the sample on the server: its result is an error that says so.
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
        chat = [{"role": "user", "content": "Tell me a story about the sea."}]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompt = types.ModelInput.from_ints(tokens)

        with sampler.sample_stream(prompt, 1, types.SamplingParams(max_tokens=40, seed=3)) as stream:
            for event in stream:
                if isinstance(event, types.SampledToken):
                    print(event.text or tokenizer.decode([event.token]), end="", flush=True)
                else:
                    how = "streamed" if event.streamed else "not streamed"
                    print(f"\n[{event.num_tokens} tokens, {how}; stop reason {event.stop_reasons[0]}]")

        # Leaving the block closes the stream, which cancels the rest of the sample.
        with sampler.sample_stream(prompt, 8, types.SamplingParams(max_tokens=200, stop=[])) as stream:
            first = [next(stream).token for _ in range(5)]
        print(f"[stopped after {len(first)} tokens: {tokenizer.decode(first)!r}]")
        try:
            service.poll(stream.request_id, types.SampleResponse).result()
            print("[the server had finished it]")
        except tinkex.RequestFailedError as error:
            print(f"[on the server: {error}]")


if __name__ == "__main__":
    main()
