"""Monitor the runs of your own loop, and restart a lost run from its best checkpoint.

You will see two checkpoints saved with their losses, the loss of the run, the monitor restart it from the
checkpoint with the lower loss, and the restarted run continue and save again.
"""

from __future__ import annotations

import os

import tinkex
from tinkex import types
from tinkex.recovery import Best, RecoveryMonitor, RecoveryPolicy


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4, seed=0)
        tokens = training.get_tokenizer().encode("All is well that ends well.")
        batch = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]

        def train(run: tinkex.TrainingClient, steps: int) -> float:
            for _ in range(steps):
                run.forward_backward(batch, "cross_entropy")
                run.optim_step(types.AdamParams(learning_rate=5e-3))
            return run.forward(batch, "cross_entropy").result().metrics["loss:sum"]

        for name, steps in (("early", 1), ("later", 3)):
            loss = train(training, steps)
            path = training.save_state(name, user_metadata={"loss": str(loss)}).result().path
            print(f"saved {path} at loss {loss:.3f}")

        policy = RecoveryPolicy(checkpoint=Best("loss"), poll_interval_s=60, backoff_s=0.1)
        with RecoveryMonitor(service, policy) as monitor:
            monitor.watch(training)
            training.unload().result()  # simulates the loss of the run
            try:
                train(training, 1)
            except tinkex.APIStatusError as error:
                print(f"lost: {error}")
                # The monitor would notice at its next poll; a report triggers an immediate check.
                recovered = monitor.report(training, error).result()
        training = recovered.training
        print(f"resumed as {training.model_id}, because the old run was {recovered.condition}")
        print(f"from {recovered.checkpoint}")
        again = training.forward(batch, "cross_entropy").result().metrics["loss:sum"]
        print(f"loss {again:.3f} as saved, {train(training, 2):.3f} two steps later")
        print("saved", training.save_state("recovered").result().path)


if __name__ == "__main__":
    main()
