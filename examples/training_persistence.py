"""Save a run with its optimizer for a day, and resume from it exactly.

You will see a checkpoint and its expiry; a step after saving, undone and repeated with the same result; and a new
run created from the checkpoint, with the optimizer state (the same loss again) and without it (a different loss,
because Adam's moments start from zero).
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types

DAY_S = 86_400


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4, seed=0)
        tokens = training.get_tokenizer().encode("A stitch in time saves nine.")
        batch = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]

        def step(run: tinkex.TrainingClient) -> float:
            """Trains on the batch once and returns the loss after it."""
            run.forward_backward(batch, "cross_entropy")
            run.optim_step(types.AdamParams(learning_rate=2e-3))
            return run.forward(batch, "cross_entropy").result().metrics["loss:sum"]

        for _ in range(3):
            step(training)
        path = training.save_state("third-step", ttl_seconds=DAY_S).result().path
        saved = service.create_rest_client().list_checkpoints(training.model_id).result().checkpoints[0]
        print(f"saved {path}, expires {saved.expires_at:%Y-%m-%d %H:%M} UTC")

        print(f"fourth step                         loss {step(training):.5f}")
        training.load_state_with_optimizer(path).result()
        print(f"restored and repeated               loss {step(training):.5f}")
        resumed = service.create_training_client_from_state_with_optimizer(path)
        print(f"in a new run, with the optimizer    loss {step(resumed):.5f}")
        reset = service.create_training_client_from_state(path)
        print(f"in a new run, with a new optimizer  loss {step(reset):.5f}")


if __name__ == "__main__":
    main()
