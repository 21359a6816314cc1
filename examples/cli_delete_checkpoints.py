"""Delete several checkpoints with one command, called from a program.

You will see two checkpoints created, listed by `tinkex checkpoint list` and deleted by one `tinkex checkpoint
delete`, the empty list, and the exit code of a failed deletion.
"""

from __future__ import annotations

import os

import tinkex
from tinkex.cli import run


def tinkex_command(*arguments: str) -> None:
    print("$ tinkex", *arguments, flush=True)
    print("exit code", run([*arguments, "--base-url", os.environ.get("TINKER_BASE_URL") or "local"]))


def main() -> None:
    with tinkex.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL") or "local") as service:
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4)
        saved = [training.save_state(name) for name in ("first", "second")]
        paths = [future.result().path for future in saved]
        print("created", *paths, sep="\n  ")

        # The command uses the engine of this process, so both see the same checkpoints.
        tinkex_command("checkpoint", "list", "--run-id", training.model_id)
        tinkex_command("checkpoint", "delete", *paths, "--yes")
        tinkex_command("checkpoint", "list", "--run-id", training.model_id)
        tinkex_command("checkpoint", "delete", paths[0], "--yes")


if __name__ == "__main__":
    main()
