"""Compute logprobs of texts with a forward pass, without gradients.

You will see, for three texts, the loss and statistics of the per-token logprobs, which are returned as arrays;
and that the run's weights have not changed.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types

TEXTS = ("The cat sat on the mat.", "The mat sat on the cat.", "Mat the on sat cat the.")


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4, seed=0)
        tokenizer = training.get_tokenizer()

        data = []
        for text in TEXTS:
            tokens = tokenizer.encode(text)
            data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}))

        output = training.forward(data, "cross_entropy").result()
        for text, outputs in zip(TEXTS, output.loss_fn_outputs, strict=True):
            logprobs = outputs["logprobs"].to_numpy()  # to_torch() gives a tensor
            print(f"{text!r}: {logprobs.dtype} {logprobs.shape}")
            print(f"    mean {logprobs.mean():.3f}  min {logprobs.min():.3f}  max {logprobs.max():.3f}")
        total = -sum(float(outputs["logprobs"].to_numpy().sum()) for outputs in output.loss_fn_outputs)
        print(f"loss:sum {output.metrics['loss:sum']:.4f}, from the logprobs {total:.4f}")

        again = training.forward(data, "cross_entropy").result()
        print("unchanged:", again.metrics["loss:sum"] == output.metrics["loss:sum"])


if __name__ == "__main__":
    main()
