"""The name of an adapted head: PEFT calls it ``lm_head``, and the Tinker service ``model.unembed_tokens``.

PEFT ignores tensors of modules that a model does not have, so an adapter with the service's name would lose its head there
without an error. What is downloaded therefore has PEFT's name.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

__all__ = ["name_head_for_peft"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MANIFEST_FILE = "manifest.json"
TINKER_HEAD, PEFT_HEAD = "model.unembed_tokens.lora_", "lm_head.lora_"


def name_head_for_peft(directory: Path) -> None:
    """Renames the head of the adapter in a directory, if it has one with the service's name.

    The files change in place, so a manifest with their digests is removed.

    ::

        name_head_for_peft(Path("run-7_sampler_weights_final"))
        peft.PeftModel.from_pretrained(base, "run-7_sampler_weights_final")
    """
    weights, config_file = directory / WEIGHTS_FILE, directory / CONFIG_FILE
    if not weights.is_file() or not config_file.is_file():
        return  # encrypted, or not an adapter
    with weights.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        if not any(TINKER_HEAD in name for name in header):
            return
        names = {name.replace(TINKER_HEAD, PEFT_HEAD): entry for name, entry in header.items()}
        file.seek(8)
        # PEFT's name is shorter: spaces fill the header, so that the tensors stay where they are.
        file.write(json.dumps(names, separators=(",", ":"), ensure_ascii=False).encode().ljust(length))
    config = json.loads(config_file.read_text(encoding="utf-8"))
    modules = config.get("target_modules")
    if isinstance(modules, list):
        config["target_modules"] = sorted(
            {"lm_head" if name == "unembed_tokens" else name for name in modules}
        )
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
