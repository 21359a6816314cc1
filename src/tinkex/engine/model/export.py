"""Merges an adapter into its base model and writes an ordinary Hugging Face model directory.

The merged weight of a module is W + scale · B A, computed in fp32. If a model has tied embeddings, an adapter of the
unembedding unties them: the exported model has both, and its input embedding is the base's.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.lora import UNEMBED_MODULE, Adapter, LoraLayout
from tinkex.engine.model.progress import Progress, report
from tinkex.engine.model.stored_tensors import StoredTensors, read_architecture, read_json, tensor_names
from tinkex.engine.model.weight_files import WeightEntry, write_weights
from tinkex.errors import InvalidInput, SetupError

__all__ = ["ExportDtype", "export_model"]

ExportDtype = Literal["float32", "bfloat16", "float16"]

_DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
}
# Files of a model directory, besides config.json and the weights, that the merged model shares.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
)


def export_model(
    base: Path,
    target: Path,
    adapter: Adapter | None = None,
    *,
    dtype: ExportDtype = "float32",
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Path:
    """Writes the model in ``base`` with ``adapter`` merged into it as a new directory ``target``, and returns ``target``.

    ``target`` must not exist; it is created atomically. Weights are read, merged and written one tensor at a time, so only
    a few tensors are in memory. bfloat16 and float16 round the merged weights, which changes the logits far more than
    fp32 does.

    Example:
        >>> base = resolve("HuggingFaceTB/SmolLM2-135M-Instruct", models_home)
        >>> adapter = load_adapter(Path("checkpoints/step-10"), read_architecture(base))
        >>> export_model(base, Path("merged"), adapter, dtype="bfloat16")
        >>> # transformers: AutoModelForCausalLM.from_pretrained("merged")
    """
    if dtype not in _DTYPES:
        raise InvalidInput(f"dtype {dtype!r} cannot be exported; choose one of {', '.join(_DTYPES)}")
    if max_shard_bytes < 1:
        raise InvalidInput(f"max_shard_bytes must be at least 1, and is {max_shard_bytes}")
    if target.is_symlink() or target.exists():
        raise InvalidInput(f"{target} exists already; choose another directory, or remove it")
    arch = read_architecture(base)
    if adapter is not None and LoraLayout.of(arch, adapter.spec) != adapter.layout:
        raise InvalidInput(
            f"the adapter was trained on another model than {base}; use the model it was trained on"
        )
    partial_directory = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial_directory.mkdir()
        try:
            _write(base, partial_directory, arch, adapter, dtype, max_shard_bytes, progress)
            _fsync(partial_directory)
            partial_directory.rename(target)
        except BaseException:
            shutil.rmtree(partial_directory, ignore_errors=True)
            raise
    except OSError as error:
        raise SetupError(
            f"{target} cannot be written ({error.strerror or error}); free disk space, or choose another directory"
        ) from error
    return target


def _write(
    base: Path,
    directory: Path,
    arch: Architecture,
    adapter: Adapter | None,
    dtype: ExportDtype,
    max_shard_bytes: int,
    progress: Progress | None,
) -> None:
    untied = arch.tie_embeddings and adapter is not None and UNEMBED_MODULE in adapter.modules
    torch_dtype, format_dtype = _DTYPES[dtype]
    with ExitStack() as files:
        stored = StoredTensors(base, files)
        stored.check(arch)
        names = [*tensor_names(arch), *(["lm_head.weight"] if untied else [])]
        entries = []
        for name in names:
            source = "embed_tokens.weight" if untied and name == "lm_head.weight" else name
            shape = stored.shape(source)
            content = partial(_merged_bytes, stored, source, name, shape, adapter, torch_dtype)
            hub_name = name if name.startswith("lm_head.") else f"model.{name}"
            entries.append(WeightEntry(hub_name, format_dtype, shape, content))
        _check_disk_space(directory, sum(entry.num_bytes for entry in entries))
        write_weights(
            directory, entries, max_shard_bytes=max_shard_bytes, phase="merging weights", progress=progress
        )
    report(progress, "copying the tokenizer")
    for file_name in _COPIED:
        if (base / file_name).is_file():
            shutil.copyfile(base / file_name, directory / file_name)
    config = dict(read_json(base / "config.json"))
    (directory / "config.json").write_text(
        json.dumps(_new_config(config, dtype, untied=untied), indent=2, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )


def _new_config(config: Mapping[str, Any], dtype: ExportDtype, *, untied: bool) -> dict[str, Any]:
    """The base's config, with the fields that merging changes."""
    dtype_field = "dtype" if "dtype" in config else "torch_dtype"
    changed: dict[str, Any] = {dtype_field: dtype} | ({"tie_word_embeddings": False} if untied else {})
    return {**config, **changed}


def _merged_bytes(
    stored: StoredTensors,
    source: str,
    name: str,
    shape: tuple[int, ...],
    adapter: Adapter | None,
    dtype: torch.dtype,
) -> memoryview:
    weight = stored.read(source, shape)
    pair = None if adapter is None else adapter.views.get(_module(name))
    if adapter is not None and pair is not None:
        a, b = (matrix.detach() for matrix in pair)
        weight = torch.addmm(weight.float(), b, a, alpha=adapter.spec.scale)
        if not _is_finite(weight):
            raise InvalidInput(
                f"merging {name} gives numbers that are not finite; export an earlier checkpoint"
            )
    converted = weight.to(dtype)
    if dtype == torch.float16 and not _is_finite(converted):
        raise InvalidInput(f"{name} has weights beyond the range of float16; export bfloat16 or float32")
    return converted.contiguous().flatten().view(torch.uint8).numpy().data


def _module(name: str) -> tuple[str, int | None]:
    """The module and layer of a weight, as adapters name them; norms and biases have none."""
    parts = name.split(".")
    if parts[-1] != "weight":
        return "", None
    return parts[-2], int(parts[1]) if parts[0] == "layers" else None


def _is_finite(tensor: Tensor) -> bool:
    return math.isfinite(float(tensor.abs().max()))


def _check_disk_space(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise SetupError(
            f"the exported model takes {num_bytes:,} bytes, and {directory.parent} has {free:,} free; free disk space, "
            "choose another directory, or export bfloat16"
        )


def _fsync(directory: Path) -> None:
    """Flushes every file to disk before the rename, so that a power failure cannot leave them incomplete."""
    for path in sorted(directory.iterdir()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
