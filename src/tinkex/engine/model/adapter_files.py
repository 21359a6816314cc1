"""Reads and writes adapters as ordinary PEFT directories.

A directory has ``adapter_config.json`` and ``adapter_model.safetensors``. Adapters saved here load in ``peft`` with the
same logits, and vice versa. An adapter of the unembedding of a model with tied embeddings does not change the input
embeddings, because it is not merged.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from tinkex.engine.model.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.lora import (
    ATTENTION_MODULES,
    MLP_MODULES,
    UNEMBED_MODULE,
    Adapter,
    LoraLayout,
    LoraSlot,
    LoraSpec,
)
from tinkex.errors import InvalidInput

__all__ = [
    "CONFIG_FILE",
    "TINKER_UNEMBED_PATH",
    "UNEMBED_BASE_NAMES",
    "WEIGHTS_FILE",
    "load_adapter",
    "reject_pickle",
    "save_adapter",
]

PICKLE_FILE = "adapter_model.bin"

StoredName = tuple[str, int | None, str]
"""Module, layer (None for the unembedding) and matrix (A or B) of a stored tensor."""

_PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(
    r"(?:model\.)?"
    r"(?:layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<module>[qkvo]_proj|gate_proj|up_proj|down_proj)"
    r"|(?P<unembed>lm_head|unembed_tokens))"
    r"\.lora_(?P<matrix>[AB])(?:\.\w+)?\.weight"
)
UNEMBED_BASE_NAMES = frozenset({"lm_head.base_layer.weight", f"{_PREFIX}lm_head.base_layer.weight"})
"""PEFT copies the frozen base weight of an adapted unembedding into the adapter's file, under this name."""


TINKER_UNEMBED_PATH = "model.unembed_tokens"
"""The name of the unembedding in exports of the Tinker service, tied or not."""


def save_adapter(
    directory: Path, adapter: Adapter, base_model: str, *, unembed_path: str = UNEMBED_MODULE
) -> None:
    """Writes ``adapter`` as a PEFT directory that names ``base_model`` as its base.

    PEFT calls the unembedding ``lm_head``; tools for exports of the Tinker service expect ``TINKER_UNEMBED_PATH``.

    Example:
        >>> save_adapter(Path("my-adapter"), adapter, "HuggingFaceTB/SmolLM2-135M-Instruct")
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    modules: set[str] = set()
    for slot in adapter.layout.slots:
        a, b = adapter.views[slot.module, slot.layer]
        path = unembed_path if slot.module == UNEMBED_MODULE else _module_path(slot)
        tensors[f"{_PREFIX}{path}.lora_A.weight"] = a.detach().numpy()
        tensors[f"{_PREFIX}{path}.lora_B.weight"] = b.detach().numpy()
        modules.add(path.rpartition(".")[2])
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
        "target_modules": sorted(modules),
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

    A part of the model (attention, MLP, unembedding) counts as trained if the adapter has any tensor for it. Missing
    modules get a B of zeros, and so do the unused ranks of modules with a smaller rank than others, so the outputs are
    those of PEFT. Scales that differ between modules are multiplied into B. Raises ``InvalidInput``, which names the
    field or tensor, for what cannot be honoured.

    Example:
        >>> adapter = load_adapter(Path("my-adapter"), model.arch)
        >>> adapter.spec.rank
        8
    """
    config = AdapterConfig.read(directory)
    stored = _read_tensors(directory, arch)
    modules = {module for module, _, _ in stored}
    rank, alpha = _common_rank_and_alpha(config, stored)
    spec = LoraSpec(
        rank=rank,
        seed=0,  # for the A of missing modules, whose B is zero
        train_mlp=any(module in modules for module in MLP_MODULES),
        train_attn=any(module in modules for module in ATTENTION_MODULES),
        train_unembed=UNEMBED_MODULE in modules,
        alpha=alpha,
    )
    pairs: list[tuple[LoraSlot, Tensor, Tensor]] = []
    for slot in LoraLayout.of(arch, spec).slots:
        a, b = (stored.pop((slot.module, slot.layer, matrix), None) for matrix in "AB")
        if a is not None and b is not None:
            _check(slot, a, b, config, directory)
            pairs.append((slot, a, b))
        elif a is not None or b is not None:
            present = "A" if a is not None else "B"
            raise InvalidInput(f"adapter {directory} has only lora_{present} of {_module_path(slot)}")
    if stored:
        raise InvalidInput(
            f"adapter {directory} has tensors for layer {min(layer or 0 for _, layer, _ in stored)}, "
            f"and the base model has {arch.num_layers} layers; use the base model it was trained on"
        )
    # Allocated only after every tensor has the shape that its config claims.
    adapter = Adapter.create(arch, spec)
    for slot, a, b in pairs:
        _fill(adapter, slot, a, b, config)
    return adapter


def reject_pickle(directory: Path) -> None:
    """Raises ``InvalidInput`` for an adapter whose weights are stored only as a pickle."""
    if (directory / PICKLE_FILE).exists() and not (directory / WEIGHTS_FILE).exists():
        raise InvalidInput(
            f"{directory} has its weights only in {PICKLE_FILE}, which can run code when it is read; only safetensors adapters "
            "are supported, so save it as one (model.save_pretrained(directory, safe_serialization=True))"
        )


def _common_rank_and_alpha(config: AdapterConfig, stored: Mapping[StoredName, Tensor]) -> tuple[int, float]:
    """The largest rank of any module, and the alpha that gives most modules their scale."""
    if config.uniform:
        return config.rank, config.alpha * (math.sqrt(config.rank) if config.rank_stabilized else 1.0)
    names = {_module_path_of(module, layer) for module, layer, _ in stored}
    rank = max(map(config.rank_of, names))
    # Modules with the most common scale keep their B bit for bit; those with scale 0 get a B of zeros.
    scales = Counter(scale for scale in map(config.scale_of, names) if scale)
    most_common = scales.most_common(1)[0][0] if scales else 1.0
    return rank, most_common * rank


def _check(slot: LoraSlot, a: Tensor, b: Tensor, config: AdapterConfig, directory: Path) -> None:
    rank = config.rank_of(_module_path(slot))
    for matrix, tensor, shape in (("A", a, (rank, slot.in_features)), ("B", b, (slot.out_features, rank))):
        name = f"{_module_path(slot)}.lora_{matrix}"
        if tuple(tensor.shape) != shape:
            raise InvalidInput(
                f"{name} of adapter {directory} is {tuple(tensor.shape)}, and the base model needs {shape}; "
                "use the base model and the rank it was trained with"
            )
        if not tensor.is_floating_point():
            raise InvalidInput(
                f"{name} of adapter {directory} is stored as {tensor.dtype}; it must be a float type"
            )


def _fill(adapter: Adapter, slot: LoraSlot, a: Tensor, b: Tensor, config: AdapterConfig) -> None:
    """Copies one module's tensors into the first ranks of the adapter."""
    rank = config.rank_of(_module_path(slot))
    a_view, b_view = adapter.views[slot.module, slot.layer]
    a_view[:rank].copy_(a)
    factor = 1.0 if config.uniform else config.scale_of(_module_path(slot)) / adapter.spec.scale
    b_view[:, :rank].copy_(b if math.isclose(factor, 1.0, rel_tol=1e-12) else b.double() * factor)


def _module_path(slot: LoraSlot) -> str:
    return _module_path_of(slot.module, slot.layer)


def _module_path_of(module: str, layer: int | None) -> str:
    if layer is None:
        return module
    block = "self_attn" if module in ATTENTION_MODULES else "mlp"
    return f"model.layers.{layer}.{block}.{module}"


def _check_unembedding(shape: Sequence[int], arch: Architecture, directory: Path) -> None:
    expected = (arch.vocab_size, arch.hidden_size)
    if tuple(shape) != expected:
        raise InvalidInput(
            f"adapter {directory} has an unembedding of shape {tuple(shape)}, and the base model's is {expected}; "
            "adapters with a resized vocabulary are not supported"
        )


def _read_tensors(directory: Path, arch: Architecture) -> dict[StoredName, Tensor]:
    """Every tensor of the adapter."""
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        reject_pickle(directory)
        raise InvalidInput(
            f"{directory} has no {WEIGHTS_FILE}; only safetensors adapters are supported, so save it as one"
        )
    tensors: dict[StoredName, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- a safetensors file is not a mapping
                if name in UNEMBED_BASE_NAMES:
                    _check_unembedding(file.get_slice(name).get_shape(), arch, directory)
                    continue
                match = _TENSOR_NAME.fullmatch(name.removeprefix(_PREFIX))
                if match is None:
                    raise _unknown_tensor(name, directory)
                layer = None if match["layer"] is None else int(match["layer"])
                key = (match["module"] or UNEMBED_MODULE, layer, match["matrix"])
                if key in tensors:
                    raise InvalidInput(f"adapter {directory} has {name} twice, under two names")
                tensors[key] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path} cannot be read as safetensors ({error})") from error
    if not tensors:
        raise InvalidInput(f"{path} contains no tensors")
    return tensors


def _unknown_tensor(name: str, directory: Path) -> InvalidInput:
    if "lora_embedding" in name or "embed_tokens" in name:
        return InvalidInput(
            f"tensor {name} of adapter {directory} changes the input embeddings, which is not supported; train it "
            "without embed_tokens among target_modules and modules_to_save"
        )
    if "lora_magnitude_vector" in name:
        return InvalidInput(
            f"tensor {name} of adapter {directory} is part of DoRA, which is not supported; only plain LoRA is"
        )
    if name.endswith("lm_head.weight"):
        return InvalidInput(
            f"tensor {name} of adapter {directory} replaces the unembedding, which is not supported; if it is the base "
            "model's, save the adapter with save_embedding_layers=False"
        )
    return InvalidInput(f"tensor {name} of adapter {directory} is not part of the base model")
