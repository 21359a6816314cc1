"""Train a step, and download the checkpoint as a PEFT directory.

You will see a checkpoint saved, downloaded and extracted, with its size and files, and the adapter's settings and
tensors read from the files with standard libraries.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from safetensors import safe_open

import tinkex
from tinkex import types
from tinkex.checkpoints import download_checkpoint


def main() -> None:
    base_url = os.environ.get("TINKER_BASE_URL") or "local"
    with (
        tinkex.ServiceClient(base_url=base_url) as service,
        tempfile.TemporaryDirectory() as scratch,
    ):
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        training = service.create_lora_training_client(model, rank=4, seed=0)
        datum = types.Datum(types.ModelInput.from_ints([5, 9, 12]), {"target_tokens": [9, 12, 7]})
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3))
        path = training.save_state("exported").result().path
        print("saved", path)

        def progress(name: str, done: int, total: int | None) -> None:
            if done == total:
                print(f"downloaded {name}: {done:,} bytes")

        # Call the function again to resume an interrupted download.
        found = download_checkpoint(path, Path(scratch), base_url=base_url, progress=progress)
        print(f"extracted {found.num_bytes:,} bytes into {found.directory.name}")
        for file in sorted(found.directory.iterdir()):
            print(f"  {file.name:32} {file.stat().st_size:>10,}")

        settings = json.loads((found.directory / "adapter_config.json").read_text())
        print(
            f"a {settings['peft_type']} adapter of rank {settings['r']} for {settings['base_model_name_or_path']}"
        )
        with safe_open(found.directory / "adapter_model.safetensors", "numpy") as tensors:
            names = list(tensors.keys())
            print(f"{len(names)} tensors, for example {names[0]} {tensors.get_tensor(names[0]).shape}")


if __name__ == "__main__":
    main()
