"""Merges an adapter into its base model and writes a GGUF file for llama.cpp, ollama and others.

Matrices are stored as F16 or Q8_0; norms and biases as F32, which llama.cpp requires. It rotates the heads of Llama and
Mistral models in interleaved pairs, so the rows of their query and key projections are reordered
([ADR 29](docs/adr/0029-gguf-export.md)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.export import MergedTensors, check_disk_space, check_new, write_atomically
from tinkex.engine.model.gguf import ROPE_FACTORS, TENSORS
from tinkex.engine.model.gguf_vocabulary import describe_tokenizer
from tinkex.engine.model.lora import Adapter
from tinkex.engine.model.progress import Progress, report
from tinkex.engine.model.rope import RopeConfig, Rotary
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.errors import InvalidInput, SetupError

__all__ = ["GGUF_TYPES", "GgufType", "export_gguf"]

GgufType = Literal["f16", "q8_0"]
GGUF_TYPES: tuple[GgufType, ...] = ("f16", "q8_0")
"""How the matrices of an exported file can be stored."""

_FILE_TYPES = {"f16": 1, "q8_0": 7}
_BLOCK = 32
"""Weights of a row that share a scale in Q8_0."""
_BLOCK_BYTES = 34
_GGUF_NAMES = {hub_name.removeprefix("model."): name for name, hub_name in TENSORS.items()}


@dataclass(frozen=True)
class _GgufEntry:
    """A tensor of the file: its name here and in the file, its shape, and how it is stored."""

    source: str
    name: str
    shape: tuple[int, ...]
    stored_as: str

    @property
    def num_bytes(self) -> int:
        count = math.prod(self.shape)
        return (
            count // _BLOCK * _BLOCK_BYTES
            if self.stored_as == "Q8_0"
            else count * (4 if self.stored_as == "F32" else 2)
        )


def export_gguf(
    base: Path,
    target: Path,
    adapter: Adapter | None = None,
    *,
    gguf_type: GgufType = "f16",
    progress: Progress | None = None,
) -> Path:
    """Writes the model in ``base`` with ``adapter`` merged into it as the new GGUF file ``target``, and returns ``target``.

    ``target`` must not exist; it is created atomically. The file has the tokenizer and the chat template. Weights are read,
    merged and written one tensor at a time. ``q8_0`` takes about half the space of ``f16`` and rounds each weight to one of
    255 multiples of its block's scale. Raises ``SetupError`` for a model that llama.cpp would compute in another way.

    Example:
        >>> base = resolve("HuggingFaceTB/SmolLM2-135M-Instruct", models_home)
        >>> adapter = load_adapter(Path("checkpoints/step-10"), read_architecture(base))
        >>> export_gguf(base, Path("mine.gguf"), adapter, gguf_type="q8_0")
        >>> # llama-cli -m mine.gguf
    """
    if gguf_type not in GGUF_TYPES:
        raise InvalidInput(
            f"weights cannot be stored as {gguf_type!r}; choose one of {', '.join(GGUF_TYPES)}"
        )
    if target.suffix != ".gguf":
        raise InvalidInput(
            f"{target} does not end in .gguf, which llama.cpp and ollama expect; choose such a name"
        )
    check_new(target)
    report(progress, "reading the tokenizer")
    with ExitStack() as files:
        merged = MergedTensors(base, adapter, files)
        metadata = {
            "general.type": "model",
            "general.name": target.stem,
            "general.file_type": _FILE_TYPES[gguf_type],
            "general.quantization_version": 2,
            **_describe_architecture(merged.arch),
            **describe_tokenizer(EngineTokenizer(base), merged.arch.vocab_size),
        }
        with write_atomically(target) as path:
            _write(path, merged, metadata, _entries(merged, gguf_type), progress)
    return target


def _describe_architecture(arch: Architecture) -> dict[str, Any]:
    """Returns the metadata of the architecture; raises ``SetupError`` for one that llama.cpp computes in another way."""
    if arch.family == "qwen3" and (arch.attention_bias or arch.output_bias):
        raise _unsupported("Qwen3 with attention biases", "biases")
    if arch.sliding_window is not None and not (arch.family == "mistral" and all(arch.sliding_layers)):
        raise _unsupported("sliding-window attention in some layers", "a window")
    name = _architecture_name(arch)
    described: dict[str, Any] = {
        "vocab_size": arch.vocab_size,
        "context_length": arch.max_context,
        "embedding_length": arch.hidden_size,
        "block_count": arch.num_layers,
        "feed_forward_length": arch.intermediate_size,
        "attention.head_count": arch.num_heads,
        "attention.head_count_kv": arch.num_kv_heads,
        "attention.key_length": arch.head_dim,
        "attention.value_length": arch.head_dim,
        "attention.layer_norm_rms_epsilon": float(arch.rms_norm_eps),
        "rope.dimension_count": arch.head_dim,
        "rope.freq_base": float(arch.rope.theta),
        **_describe_scaling(arch.rope),
    }
    if arch.sliding_window is not None:
        # llama.cpp has no window for this architecture: within this context the two are the same.
        described |= {
            "attention.sliding_window": arch.sliding_window,
            "context_length": min(arch.max_context, arch.sliding_window),
        }
    return {f"{name}.{key}": value for key, value in described.items()}


def _unsupported(what: str, lacking: str) -> SetupError:
    return SetupError(
        f"{what} cannot be exported to GGUF, because llama.cpp does not compute {lacking} there; export a model directory "
        "instead (without --gguf)"
    )


def _architecture_name(arch: Architecture) -> str:
    return "llama" if arch.family == "mistral" else arch.family


def _describe_scaling(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
    if rope.kind != "yarn":
        return {}
    usual = RopeConfig.from_config(
        {
            "rope_theta": rope.theta,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": rope.factor,
                "original_max_position_embeddings": rope.original_context,
            },
        }
    )
    if rope != usual:
        raise _unsupported("YaRN with other parameters than its factor and original context", "them")
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope.factor),
        "rope.scaling.original_context_length": rope.original_context,
    }


def _entries(merged: MergedTensors, gguf_type: GgufType) -> list[_GgufEntry]:
    entries = []
    for source in merged.names:
        shape = merged.shape(source)
        fits = gguf_type == "q8_0" and shape[-1] % _BLOCK == 0
        stored_as = "F32" if len(shape) == 1 else "Q8_0" if fits else "F16"
        entries.append(_GgufEntry(source, _gguf_name(source), shape, stored_as))
    return entries


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("layers."):
        return f"{_GGUF_NAMES[stem]}.{kind}"
    _, layer, module = stem.split(".", 2)
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"


def _write(
    path: Path,
    merged: MergedTensors,
    metadata: Mapping[str, Any],
    entries: list[_GgufEntry],
    progress: Progress | None,
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    factors = _rope_factors(merged.arch)
    total = sum(entry.num_bytes for entry in entries)
    check_disk_space(path, total + (0 if factors is None else factors.nbytes), "q8_0")
    writer = GGUFWriter(path, _architecture_name(merged.arch))
    try:
        _add_metadata(writer, metadata)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        for entry in entries:
            stored_as = GGMLQuantizationType[entry.stored_as]
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.num_bytes, stored_as)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        done = 0
        for entry in entries:
            writer.write_tensor_data(_content(merged, entry))
            done += entry.num_bytes
            report(progress, "merging weights", done, total)
        writer.flush()
    finally:
        writer.close()


def _add_metadata(writer: Any, metadata: Mapping[str, Any]) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in metadata.items():
        adders.get(type(value), writer.add_array)(key, value)


def _content(merged: MergedTensors, entry: _GgufEntry) -> np.ndarray[Any, Any]:
    from gguf import GGMLQuantizationType, quantize

    dtype = torch.float16 if entry.stored_as == "F16" else torch.float32
    weight = merged.read_as(entry.source, dtype, "q8_0, or a model directory").numpy()
    if _architecture_name(merged.arch) == "llama":
        if ".q_proj." in entry.source:
            weight = _interleave(weight, merged.arch.num_heads)
        elif ".k_proj." in entry.source:
            weight = _interleave(weight, merged.arch.num_kv_heads)
    if entry.stored_as != "Q8_0":
        return np.ascontiguousarray(weight)
    quantized: np.ndarray[Any, Any] = quantize(np.ascontiguousarray(weight), GGMLQuantizationType.Q8_0)
    return quantized


def _interleave(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorders the rows of each head from halves (0, 1, …, h, h + 1, …) to interleaved pairs (0, h, 1, h + 1, …)."""
    per_head = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)


def _rope_factors(arch: Architecture) -> np.ndarray[Any, Any] | None:
    """Returns the divisors of the frequencies of Llama 3; other scalings are metadata."""
    if arch.rope.kind != "llama3":
        return None
    plain = Rotary(RopeConfig(theta=arch.rope.theta), arch.head_dim).inverse_frequencies_h
    return (plain / Rotary(arch.rope, arch.head_dim).inverse_frequencies_h).numpy().astype(np.float32)
