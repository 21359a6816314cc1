"""Adapters on disk: ordinary PEFT directories, in both directions.

A directory holds ``adapter_config.json`` and ``adapter_model.safetensors``. What is saved here loads in
``peft`` with the same logits, and the other way round. Merging an adapter of the unembedding into a model
with tied embeddings would change its input embeddings as well; kept apart, as here, it does not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.lora import (
    ATTENTION_MODULES,
    MLP_MODULES,
    UNEMBED_MODULE,
    Adapter,
    LoraSlot,
    LoraSpec,
)
from tinkex.errors import InvalidInput

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "load_adapter", "save_adapter"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(
    r"(?:model\.)?"
    r"(?:layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<module>[qkvo]_proj|gate_proj|up_proj|down_proj)"
    r"|(?P<unembed>lm_head|unembed_tokens))"
    r"\.lora_(?P<half>[AB])(?:\.\w+)?\.weight"
)
# PEFT copies the frozen base weight of an adapted unembedding into the adapter's file.
_UNEMBED_BASE = "lm_head.base_layer.weight"
# Fields that say how an adapter came to be, or what the tensors themselves show. Every other field must be
# unset, null or empty, because it would change what the adapter computes.
_HARMLESS = frozenset(
    {
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Other initialisations take their start out of the base weights, so the adapter does not fit the base as it is.
_HARMLESS_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def save_adapter(directory: Path, adapter: Adapter, base_model: str) -> None:
    """Writes ``adapter`` as a PEFT directory that names ``base_model`` as its base.

    Example:
        >>> save_adapter(Path("my-adapter"), adapter, "HuggingFaceTB/SmolLM2-135M-Instruct")
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for slot in adapter.layout.slots:
        a, b = adapter.views[slot.module, slot.layer]
        tensors[f"{_PREFIX}{_module_path(slot)}.lora_A.weight"] = a.detach().numpy()
        tensors[f"{_PREFIX}{_module_path(slot)}.lora_B.weight"] = b.detach().numpy()
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    alpha = adapter.spec.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": adapter.spec.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({slot.module for slot in adapter.layout.slots}),
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapter(directory: Path, arch: Architecture) -> Adapter:
    """The adapter in a PEFT directory, for models of architecture ``arch``.

    A part of the model (attention, MLP, unembedding) counts as trained if the adapter has any tensor for it;
    the rest of that part gets a B of zeros, which leaves the outputs as PEFT computes them. What cannot be
    honoured is refused by name.

    Example:
        >>> adapter = load_adapter(Path("my-adapter"), model.arch)
        >>> adapter.spec.rank
        8
    """
    config = _read_config(directory)
    rank, alpha = _rank_and_alpha(config)
    stored = _read_tensors(directory, arch)
    modules = {module for module, _, _ in stored}
    spec = LoraSpec(
        rank=rank,
        seed=0,  # for the A of modules the adapter leaves out, whose B is zero
        train_mlp=any(module in modules for module in MLP_MODULES),
        train_attn=any(module in modules for module in ATTENTION_MODULES),
        train_unembed=UNEMBED_MODULE in modules,
        alpha=alpha,
    )
    adapter = Adapter.create(arch, spec)
    for slot in adapter.layout.slots:
        halves = [(half, stored.pop((slot.module, slot.layer, half), None)) for half in "AB"]
        present = [half for half, tensor in halves if tensor is not None]
        if len(present) == 1:
            raise InvalidInput(f"adapter {directory} has only lora_{present[0]} of {_module_path(slot)}")
        for view, (half, tensor) in zip(adapter.views[slot.module, slot.layer], halves, strict=True):
            if tensor is not None:
                _copy(view, tensor, f"{_module_path(slot)}.lora_{half}", directory)
    if stored:
        raise InvalidInput(
            f"adapter {directory} has tensors for layer {min(layer or 0 for _, layer, _ in stored)}, "
            f"and the base model has {arch.num_layers} layers; use the base model it was trained on"
        )
    return adapter


def _module_path(slot: LoraSlot) -> str:
    if slot.layer is None:
        return slot.module
    block = "self_attn" if slot.module in ATTENTION_MODULES else "mlp"
    return f"model.layers.{slot.layer}.{block}.{slot.module}"


def _copy(view: Tensor, tensor: Tensor, name: str, directory: Path) -> None:
    if view.shape != tensor.shape:
        raise InvalidInput(
            f"{name} of adapter {directory} is {tuple(tensor.shape)}, and the base model makes it {tuple(view.shape)}; "
            "use the base model and the rank it was trained with"
        )
    if not tensor.is_floating_point():
        raise InvalidInput(
            f"{name} of adapter {directory} is stored as {tensor.dtype}; it must be a float type"
        )
    view.copy_(tensor)


def _check_unembedding(shape: Sequence[int], arch: Architecture, directory: Path) -> None:
    expected = (arch.vocab_size, arch.hidden_size)
    if tuple(shape) != expected:
        raise InvalidInput(
            f"adapter {directory} was made for an unembedding of {tuple(shape)}, and the base model's is {expected}; "
            "adapters with a resized vocabulary do not load"
        )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidInput(f"{directory} is not a PEFT adapter: it has no {CONFIG_FILE}") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} must hold a JSON object")
    return config


def _rank_and_alpha(config: dict[str, Any]) -> tuple[int, float]:
    """The rank and the alpha whose quotient is the adapter's scale; refuses what would compute something else."""
    if config.get("peft_type") != "LORA":
        raise InvalidInput(f"peft_type {config.get('peft_type')!r} is not supported; only LORA adapters are")
    if config.get("bias", "none") != "none":
        raise InvalidInput(f"bias {config['bias']!r} of this adapter is not supported; only 'none' is")
    initialisation = config.get("init_lora_weights", True)
    if initialisation not in _HARMLESS_INITIALISATIONS:
        raise InvalidInput(
            f"init_lora_weights {initialisation!r} of this adapter changed its base model; convert it to a plain LoRA first"
        )
    refused = sorted(name for name, value in config.items() if value and name not in _HARMLESS)
    if refused:
        raise InvalidInput(
            f"{', '.join(refused)} of this adapter cannot be honoured; only plain LoRA adapters load"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if not isinstance(rank, int) or rank < 1:
        raise InvalidInput(f"r {rank!r} of this adapter must be a positive integer")
    if not isinstance(alpha, int | float):
        raise InvalidInput(f"lora_alpha {alpha!r} of this adapter must be a number")
    # Rank-stabilised LoRA divides alpha by √r instead of r.
    return rank, float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)


def _read_tensors(directory: Path, arch: Architecture) -> dict[tuple[str, int | None, str], Tensor]:
    """Every tensor of the adapter by (module, layer, half)."""
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise InvalidInput(
            f"{directory} has no {WEIGHTS_FILE}; only safetensors adapters load, so save it as such"
        )
    tensors: dict[tuple[str, int | None, str], Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- a safetensors file is not a mapping
                if name.removeprefix(_PREFIX) == _UNEMBED_BASE:
                    _check_unembedding(file.get_slice(name).get_shape(), arch, directory)
                    continue
                match = _TENSOR_NAME.fullmatch(name.removeprefix(_PREFIX))
                if match is None:
                    raise InvalidInput(f"tensor {name} of adapter {directory} has no place in the base model")
                layer = None if match["layer"] is None else int(match["layer"])
                key = (match["module"] or UNEMBED_MODULE, layer, match["half"])
                if key in tensors:
                    raise InvalidInput(f"adapter {directory} has {name} twice, under two names")
                tensors[key] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path} cannot be read as safetensors ({error})") from error
    if not tensors:
        raise InvalidInput(f"{path} holds no tensors")
    return tensors
