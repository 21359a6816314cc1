"""The weights of a Hugging Face model directory, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.config_fields import read_json
from tinkex.errors import SetupError

__all__ = ["StoredTensors", "read_architecture", "tensor_names"]

_FLOATS = {torch.float16, torch.bfloat16, torch.float32}


class StoredTensors:
    """The tensors of a directory by their names without the ``model.`` prefix, read lazily.

    Example:
        >>> with ExitStack() as files:
        ...     stored = StoredTensors(Path("models/SmolLM2-135M-Instruct"), files)
        ...     norm_D = stored.read("norm.weight", (576,))
    """

    def __init__(self, directory: Path, files: ExitStack) -> None:
        self.directory = directory
        self._files: dict[str, tuple[Any, str]] = {}
        for path in _weight_files(directory):
            try:
                file = files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise SetupError(
                    f"{path} cannot be read as safetensors ({error}); download the model again"
                ) from error
            for stored_name in file.keys():  # noqa: SIM118 -- a safetensors file is not a mapping
                name = stored_name.removeprefix("model.")
                if name in self._files:
                    raise SetupError(
                        f"the weights in {directory} have {name} twice, which is ambiguous; download the model again"
                    )
                self._files[name] = (file, stored_name)

    def check(self, arch: Architecture) -> None:
        """Raises ``SetupError`` if weights are missing, or if there are weights that the architecture does not have.

        A tied head that is stored too must equal the embedding; otherwise it is ambiguous.
        """
        expected = set(tensor_names(arch))
        # Old checkpoints store rotary frequencies, which the config determines, and some store a tied head.
        redundant = {name for name in self._files if name.endswith(".rotary_emb.inv_freq")}
        if arch.tie_embeddings:
            redundant.add("lm_head.weight")
        missing = sorted(expected - self._files.keys())
        unexpected = sorted(self._files.keys() - expected - redundant)
        if missing or unexpected:
            problems = [
                f"{kind} {_listed(names)}"
                for kind, names in (("lacks", missing), ("has unexpected", unexpected))
                if names
            ]
            raise SetupError(
                f"the weights in {self.directory} do not match its config.json ({arch.family}, {arch.num_layers} layers): it "
                f"{' and '.join(problems)}. Download the model again, or fix its config.json"
            )
        if arch.tie_embeddings and "lm_head.weight" in self._files and not self._head_is_the_embedding():
            raise SetupError(
                f"config.json ties the head of the model in {self.directory} to its embedding, and the weights have another "
                "one in lm_head.weight; set tie_word_embeddings to false if that is the head, or remove it from the weights"
            )

    def _head_is_the_embedding(self) -> bool:
        (file, name), (embedding_file, embedding_name) = (
            self._files["lm_head.weight"],
            self._files["embed_tokens.weight"],
        )
        head, embedding = file.get_tensor(name), embedding_file.get_tensor(embedding_name)
        return head.dtype == embedding.dtype and torch.equal(head, embedding)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        file, stored_name = self._files[name]
        return tuple(file.get_slice(stored_name).get_shape())

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in its stored float type; it must have this shape."""
        self._check_shape(name, shape)
        file, stored_name = self._files[name]
        tensor: Tensor = file.get_tensor(stored_name)
        if tensor.dtype not in _FLOATS:
            raise SetupError(
                f"tensor {stored_name} in {self.directory} is stored as {str(tensor.dtype).removeprefix('torch.')}; "
                "supported are float16, bfloat16 and float32"
            )
        return tensor

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """A matrix in fp32."""
        return self.read(name, (rows, columns)).float().contiguous()

    def vector(self, name: str, size: int) -> Tensor:
        """A vector in fp32."""
        return self.read(name, (size,)).float().contiguous()

    def fused_weight(self, parts: list[tuple[str, int]], columns: int) -> Tensor:
        """The projections of ``parts`` (name, rows) concatenated, in fp32."""
        for name, rows in parts:
            self._check_shape(f"{name}.weight", (rows, columns))  # before allocating what the config claims
        joined = torch.empty(sum(rows for _, rows in parts), columns)
        for (name, rows), target in zip(
            parts, joined.split_with_sizes([rows for _, rows in parts]), strict=True
        ):
            target.copy_(self.read(f"{name}.weight", (rows, columns)))
        return joined

    def fused_bias(self, parts: list[tuple[str, int]]) -> Tensor:
        """The biases of ``parts`` (name, rows) concatenated."""
        return torch.cat([self.vector(f"{name}.bias", rows) for name, rows in parts])

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.shape(name)
        if found != shape:
            raise SetupError(
                f"tensor {self._files[name][1]} in {self.directory} has shape {found}, and config.json needs {shape}"
            )


def read_architecture(directory: Path) -> Architecture:
    """The architecture of the model in ``directory``, without reading its weights."""
    return Architecture.from_config(
        read_json(directory / "config.json"),
        read_json(directory / "generation_config.json", optional=True),
    )


def tensor_names(arch: Architecture) -> Iterator[str]:
    """Every weight a model of this architecture has, without the ``model.`` prefix, in the order of a pass."""
    yield "embed_tokens.weight"
    for layer in range(arch.num_layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        yield f"layers.{layer}.input_layernorm.weight"
        biased = {"q_proj": arch.attention_bias, "k_proj": arch.attention_bias, "v_proj": arch.attention_bias}
        for name, bias in (biased | {"o_proj": arch.output_bias}).items():
            yield from [f"{attention}.{name}.weight"] + [f"{attention}.{name}.bias"] * bias
        if arch.qk_norm:
            yield f"{attention}.q_norm.weight"
            yield f"{attention}.k_norm.weight"
        yield f"layers.{layer}.post_attention_layernorm.weight"
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield from [f"{mlp}.{name}.weight"] + [f"{mlp}.{name}.bias"] * arch.mlp_bias
    yield "norm.weight"
    if not arch.tie_embeddings:
        yield "lm_head.weight"


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise SetupError(
            f"{directory} has no model.safetensors and no model.safetensors.index.json; "
            "only safetensors weights are read, so convert other formats first"
        )
    weight_map = read_json(index).get("weight_map")
    named = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not named or not weight_map:
        raise SetupError(f"{index} has no weight_map that names files; download the model again")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if name != Path(name).name or not (directory / name).is_file()]
    if missing:
        raise SetupError(
            f"{index} lists {_listed(missing)}, which {directory} does not have; download the model again"
        )
    return [directory / name for name in names]


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
