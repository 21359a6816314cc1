"""Lose a training run in the middle, and let the loop go on from its last checkpoint by itself.

You will see twelve steps, of which the seventh finds its run gone; the loop makes a new run from the last
checkpoint, with its optimizer, repeats the steps after it, and ends with every batch trained exactly once.
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
    # The recovery reports itself as warnings of the logger 'tinkex'; here they are printed with the steps.
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
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
            resume="never",  # the default goes on where an earlier start of this program stopped
            policy=RecoveryPolicy(max_attempts=3, backoff_s=0.1),
        )
        accident = True
        for step in loop:
            with step:
                if step.index == LOST_AT and accident:
                    accident = False
                    step.training.unload().result()  # the accident: the run's live weights are gone
                passed = step.training.forward_backward(step.batch, "cross_entropy")
                step.training.optim_step(types.AdamParams(learning_rate=2e-3))
                loss = passed.result().metrics["loss:sum"]
                step.report(loss=loss)
                print(f"step {step.index:2}  loss {loss:7.3f}  on {step.training.model_id[-7:]}")
        print(f"{loop.position} batches trained; last checkpoint {loop.checkpoint}")


if __name__ == "__main__":
    main()
