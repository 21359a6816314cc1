"""Monitor a run, and restart it from its best checkpoint when the server marks it as corrupted.

You will see two checkpoints saved with their losses, the server killed and its disk damaged, the run marked as
corrupted after the restart, the monitor restart it from the checkpoint with the lower loss, and the restarted run
continue and save again. The example starts and damages a server of its own.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import tinkex
from tinkex import types
from tinkex.recovery import Best, RecoveryMonitor, RecoveryPolicy


def serve(folder: Path, port: str = "0") -> tuple[subprocess.Popen, dict]:
    """Starts a server on a data directory."""
    options = ("--data-dir", str(folder), "--port", port, "--savepoint-after-operations", "2")
    command = [sys.executable, "-m", "tinkex", "--json", "serve", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    return server, json.loads(server.stdout.readline())


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        server, ready = serve(folder)
        stack.callback(lambda: server.terminate() or server.wait())
        connection = {"base_url": ready["url"], "api_key": ready["api_key"]}
        service = stack.enter_context(tinkex.ServiceClient(**connection))
        model = os.environ.get("TINKER_BASE_MODEL") or service.get_server_capabilities().model_names()[0]
        training = service.create_lora_training_client(model, rank=4, seed=0)
        tokens = types.ModelInput.from_text("All is well that ends well.", training).to_ints()
        batch = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]

        def train(run: tinkex.TrainingClient, steps: int) -> float:
            for _ in range(steps):
                run.forward_backward(batch, "cross_entropy")
                run.optim_step(types.AdamParams(learning_rate=5e-3))
            return run.forward(batch, "cross_entropy").result().loss

        for name, steps in (("early", 1), ("later", 3)):
            loss = train(training, steps)
            path = training.save_state(name, user_metadata={"loss": str(loss)}).result().path
            print(f"saved {path} at loss {loss:.3f}")

        recoveries: queue.Queue = queue.Queue()
        policy = RecoveryPolicy(
            checkpoint=Best("loss"), poll_interval_s=0.5, backoff_s=0.1, on_recovery=recoveries.put
        )
        with RecoveryMonitor(service, policy) as monitor:
            monitor.watch(training)
            server.kill()
            server.wait()
            for file in (folder / "savepoints").rglob("*"):
                if file.is_file():
                    file.unlink()  # the state of the run; its checkpoints are stored elsewhere
            server, ready = serve(folder, ready["url"].rpartition(":")[2])
            print("restarted the server on a damaged disk")
            recovered = recoveries.get(timeout=60)
        row = service.create_rest_client().get_training_run(training.model_id).result()
        print(f"{row.training_run_id}: corrupted {row.corrupted}")
        run = recovered.training
        print(f"resumed as {run.model_id}, because the old run was {recovered.condition}")
        print(f"from {recovered.checkpoint}")
        again = run.forward(batch, "cross_entropy").result().loss
        print(f"loss {again:.3f} as saved, {train(run, 2):.3f} two steps later")
        print("saved", run.save_state("recovered").result().path)


if __name__ == "__main__":
    main()
