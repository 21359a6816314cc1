"""Lose a training run, and let the loop continue from its last checkpoint automatically.

You will see twelve steps, of which the seventh loses its run; the loop creates a new run from the last
checkpoint, with its optimizer, repeats the steps after it, and trains every batch exactly once.
"""

from __future__ import annotations

import logging
import os

import tinkex
from tinkex import types
from tinkex.recovery import RecoveryPolicy

SENTENCES = ("Row, row, row your boat.", "Gently down the stream.", "Life is but a dream.")
STEPS, LOST_AT = 12, 6


def main() -> None:
    # The logger 'tinkex' shows the recovery as warnings.
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        tokenizer = service.create_sampling_client(base_model=model).get_tokenizer()

        def batch(index: int) -> list[types.Datum]:
            tokens = tokenizer.encode(SENTENCES[index % len(SENTENCES)])
            return [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]

        loop = tinkex.resilient_training(
            service,
            batch,
            steps=STEPS,
            name="row-your-boat",
            base_model=model,
            rank=4,
            seed=0,
            checkpoint_every=4,
            resume="never",  # the default resumes an earlier run of this program
            policy=RecoveryPolicy(max_attempts=3, backoff_s=0.1),
        )
        lost = False
        for step in loop:
            with step:
                if step.index == LOST_AT and not lost:
                    lost = True
                    step.training.unload().result()  # simulates the loss of the run
                passed = step.training.forward_backward(step.batch, "cross_entropy")
                step.training.optim_step(types.AdamParams(learning_rate=2e-3))
                loss = passed.result().metrics["loss:sum"]
                step.report(loss=loss)
                print(f"step {step.index:2}  loss {loss:7.3f}  on {step.training.model_id[-7:]}")
        print(f"{loop.position} batches trained; last checkpoint {loop.checkpoint}")


if __name__ == "__main__":
    main()
