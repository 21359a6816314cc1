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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tinkex.engine.model.config_fields import read_json
from tinkex.engine.model.lora import UNEMBED_MODULE, Adapter, LoraLayout
from tinkex.engine.model.progress import Progress, report
from tinkex.engine.model.stored_tensors import StoredTensors, read_architecture, tensor_names
from tinkex.engine.model.weight_files import WeightEntry, write_weights
from tinkex.errors import InvalidInput, SetupError

__all__ = [
    "ExportDtype",
    "MergedTensors",
    "check_disk_space",
    "check_new",
    "export_model",
    "write_atomically",
]

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
    check_new(target)
    with ExitStack() as files:
        merged = MergedTensors(base, adapter, files)
        with write_atomically(target) as directory:
            directory.mkdir()
            _write(base, directory, merged, dtype, max_shard_bytes, progress)
    return target


class MergedTensors:
    """The tensors of a model with an adapter merged into them, by their names without the ``model.`` prefix, read lazily.

    Example:
        >>> with ExitStack() as files:
        ...     merged = MergedTensors(Path("models/SmolLM2-135M-Instruct"), adapter, files)
        ...     norm_D = merged.read("norm.weight")
    """

    def __init__(self, base: Path, adapter: Adapter | None, files: ExitStack) -> None:
        self.arch = read_architecture(base)
        if adapter is not None and LoraLayout.of(self.arch, adapter.spec) != adapter.layout:
            raise InvalidInput(
                f"the adapter was trained on another model than {base}; use the model it was trained on"
            )
        self._adapter = adapter
        self._stored = StoredTensors(base, files)
        self._stored.check(self.arch)
        self.unties = self.arch.tie_embeddings and adapter is not None and UNEMBED_MODULE in adapter.modules
        """Whether merging gives a model with tied embeddings a head of its own."""
        self.names = [*tensor_names(self.arch), *(["lm_head.weight"] if self.unties else [])]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._stored.shape(self._source(name))

    def read(self, name: str) -> Tensor:
        """A tensor, merged in fp32; one that the adapter leaves as it is keeps its stored type."""
        weight = self._stored.read(self._source(name), self.shape(name))
        adapter = self._adapter
        pair = None if adapter is None else adapter.views.get(_module(name))
        if adapter is None or pair is None:
            return weight
        a, b = (matrix.detach() for matrix in pair)
        weight = torch.addmm(weight.float(), b, a, alpha=adapter.spec.scale)
        if not _is_finite(weight):
            raise InvalidInput(
                f"merging {name} gives numbers that are not finite; export an earlier checkpoint"
            )
        return weight

    def read_as(self, name: str, dtype: torch.dtype, alternative: str) -> Tensor:
        """A tensor in another type; ``alternative`` is advised where float16 cannot hold its weights."""
        converted = self.read(name).to(dtype)
        if dtype == torch.float16 and not _is_finite(converted):
            raise InvalidInput(f"{name} has weights beyond the range of float16; export {alternative}")
        return converted.contiguous()

    def _source(self, name: str) -> str:
        return "embed_tokens.weight" if self.unties and name == "lm_head.weight" else name


def check_new(target: Path) -> None:
    """Raises ``InvalidInput`` if ``target`` exists."""
    if target.is_symlink() or target.exists():
        raise InvalidInput(f"{target} exists already; choose another name, or remove it")


@contextmanager
def write_atomically(target: Path) -> Iterator[Path]:
    """Yields the path to write a file or directory to; it is flushed and becomes ``target``, or is removed after an error."""
    temporary = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            _fsync(temporary)
            temporary.rename(target)
        except BaseException:
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SetupError(
            f"{target} cannot be written ({error.strerror or error}); free disk space, or choose another directory"
        ) from error


def _write(
    base: Path,
    directory: Path,
    merged: MergedTensors,
    dtype: ExportDtype,
    max_shard_bytes: int,
    progress: Progress | None,
) -> None:
    torch_dtype, format_dtype = _DTYPES[dtype]
    entries = []
    for name in merged.names:
        hub_name = name if name.startswith("lm_head.") else f"model.{name}"
        content = partial(_merged_bytes, merged, name, torch_dtype)
        entries.append(WeightEntry(hub_name, format_dtype, merged.shape(name), content))
    check_disk_space(directory, sum(entry.num_bytes for entry in entries), "bfloat16")
    write_weights(
        directory, entries, max_shard_bytes=max_shard_bytes, phase="merging weights", progress=progress
    )
    report(progress, "copying the tokenizer")
    for file_name in _COPIED:
        if (base / file_name).is_file():
            shutil.copyfile(base / file_name, directory / file_name)
    config = dict(read_json(base / "config.json"))
    (directory / "config.json").write_text(
        json.dumps(_new_config(config, dtype, untied=merged.unties), indent=2, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )


def _new_config(config: Mapping[str, Any], dtype: ExportDtype, *, untied: bool) -> dict[str, Any]:
    """The base's config, with the fields that merging changes."""
    dtype_field = "dtype" if "dtype" in config else "torch_dtype"
    changed: dict[str, Any] = {dtype_field: dtype} | ({"tie_word_embeddings": False} if untied else {})
    return {**config, **changed}


def _merged_bytes(merged: MergedTensors, name: str, dtype: torch.dtype) -> memoryview:
    return merged.read_as(name, dtype, "bfloat16 or float32").flatten().view(torch.uint8).numpy().data


def _module(name: str) -> tuple[str, int | None]:
    """The module and layer of a weight, as adapters name them; norms and biases have none."""
    parts = name.split(".")
    if parts[-1] != "weight":
        return "", None
    return parts[-2], int(parts[1]) if parts[0] == "layers" else None


def _is_finite(tensor: Tensor) -> bool:
    return math.isfinite(float(tensor.abs().max()))


def check_disk_space(path: Path, num_bytes: int, smaller: str) -> None:
    """Raises ``SetupError`` if the disk of the new file or directory ``path`` has too little room; ``smaller`` is advised."""
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        raise SetupError(
            f"the exported model takes {num_bytes:,} bytes, and {path.parent} has {free:,} free; free disk space, "
            f"choose another directory, or export {smaller}"
        )


def _fsync(path: Path) -> None:
    """Flushes every file to disk before the rename, so that a power failure cannot leave them incomplete."""
    for file_path in sorted(path.iterdir()) if path.is_dir() else [path]:
        with file_path.open("rb+") as file:
            os.fsync(file.fileno())
