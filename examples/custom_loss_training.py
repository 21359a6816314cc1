"""Train with losses of your own: a function that runs here, and a graph that the server runs.

You will see both losses, written with torch, agree on the first batch, and then fall over some steps. The
first is called on this machine between a forward and a backward pass; the second is recorded once and sent.
"""

from __future__ import annotations

import os

import torch

import tinkex
from tinkex import types


def focal(data, logprobs):
    """Cross-entropy that cares less about tokens which the model already knows; gets the whole batch."""
    pairs = zip(data, logprobs, strict=True)
    loss = torch.stack([_focal(lp, datum.loss_fn_inputs["weights"].to_torch()) for datum, lp in pairs])
    return loss.sum(), {"worst_token:min": min(lp.min().item() for lp in logprobs)}


def focal_of_one(logprobs, weights):
    """The same for one datum: recorded with torch, it becomes a graph that a server can run."""
    loss = _focal(logprobs, weights)
    return loss, {"custom/focal:sum": loss}


def _focal(logprobs, weights):
    return -(weights * (1 - logprobs.exp()) ** 2 * logprobs).sum()


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
        handle = service.create_custom_loss(focal_of_one, {"logprobs": 1, "weights": 1}).result()
        for where, loss_fn in (("here", focal), ("as a graph", handle)):
            training = service.create_lora_training_client(model, rank=8, seed=0)
            tokenizer = training.get_tokenizer()
            batch = []
            for text in ("Tea is best without sugar.", "Coffee is best with milk."):
                tokens = tokenizer.encode(text)
                weights = torch.ones(len(tokens) - 1)
                inputs = {"target_tokens": tokens[1:], "weights": weights}
                batch.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
            for step in range(4):
                passed = training.forward_backward_custom(batch, loss_fn)
                training.optim_step(types.AdamParams(learning_rate=5e-3)).result()
                metrics = passed.result().metrics
                own = {name: round(value, 3) for name, value in metrics.items() if name != "loss:sum"}
                print(f"{where:10}  step {step}  loss {metrics['loss:sum']:.4f}  {own}")


if __name__ == "__main__":
    main()
