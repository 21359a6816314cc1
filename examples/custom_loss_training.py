"""Train with custom losses: a function on the client, and a graph on the server.

You will see both losses, written with torch, agree on the first batch and fall over a few steps. The first
runs on this machine between a forward and a backward pass; the second is traced once and sent to the server.
"""

from __future__ import annotations

import os

import torch

import tinkex
from tinkex import types


def focal(data, logprobs):
    """Cross-entropy with less weight on tokens that the model already predicts; gets the whole batch."""
    pairs = zip(data, logprobs, strict=True)
    loss = torch.stack([_focal(lp, datum.loss_fn_inputs["weights"].to_torch()) for datum, lp in pairs])
    return loss.sum(), {"lowest_logprob:min": min(lp.min().item() for lp in logprobs)}


def focal_datum(logprobs, weights):
    """The same loss for one datum; torch traces it to a graph that the server runs."""
    loss = _focal(logprobs, weights)
    return loss, {"custom/focal:sum": loss}


def _focal(logprobs, weights):
    return -(weights * (1 - logprobs.exp()) ** 2 * logprobs).sum()


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        handle = service.create_custom_loss(focal_datum, {"logprobs": 1, "weights": 1}).result()
        for place, loss_fn in (("client", focal), ("server", handle)):
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
                print(f"{place:6}  step {step}  loss {metrics['loss:sum']:.4f}  {own}")


if __name__ == "__main__":
    main()
