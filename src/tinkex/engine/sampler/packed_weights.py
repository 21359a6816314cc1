"""The weights of a model as the compiled core reads them: in the smallest format that is exact for their fp32 numbers.

A checkpoint that was rounded to 16 bits, or quantized in blocks as GGUF files are, has less information than its fp32
numbers take. A decode step reads every weight once, so its time is about proportional to their bytes. The format of a
matrix is found from its numbers alone: a format is used only if it represents every one of them exactly.

Shapes: D hidden, V vocabulary, O outputs and I inputs of a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from tinkex.engine.kernels.layout import MatrixC, StorageFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tinkex.engine.kernels import Core
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.model.transformer import LayerWeights, Transformer

__all__ = ["PackedWeights", "StoredMatrix", "layer_biases", "pack_matrix", "packed_weights", "plain_weights"]

_FORMATS = (StorageFormat.Q4, StorageFormat.Q8, StorageFormat.BF16, StorageFormat.FP16)  # by size


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A weight matrix as the core reads it; ``data`` is torch's tensor where it is fp32."""

    storage: StorageFormat
    data: Tensor

    @property
    def as_c(self) -> MatrixC:
        """The C structure; this object must outlive it."""
        return MatrixC(self.data.data_ptr(), self.storage)


def pack_matrix(core: Core, weight_OI: Tensor) -> StoredMatrix:
    """The matrix in the smallest exact format; unpacked if there is none.

    Example:
        >>> pack_matrix(load_core(), torch.ones(64, 64)).storage
        <StorageFormat.Q4: 4>
    """
    assert weight_OI.dtype == torch.float32
    assert weight_OI.is_contiguous(), "weights must be contiguous"
    outputs, inputs = weight_OI.shape
    for storage in _FORMATS:
        size = core.packed_bytes(storage, outputs, inputs)
        if not size:
            continue
        data = torch.empty(size, dtype=torch.uint8)
        threads = torch.get_num_threads()
        if core.pack(weight_OI.data_ptr(), outputs, inputs, storage, data.data_ptr(), threads):
            return StoredMatrix(storage, data)
    return StoredMatrix(StorageFormat.FP32, weight_OI)


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """The matrices of a model, those of a layer in the order query, key, value, output, gate, up, down."""

    layers: tuple[tuple[StoredMatrix, ...], ...]
    unembedding: StoredMatrix

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed copies; unpacked matrices use the model's memory."""
        matrices = [self.unembedding, *(matrix for layer in self.layers for matrix in layer)]
        return sum(matrix.data.nbytes for matrix in matrices if matrix.storage is not StorageFormat.FP32)


# By model and then by variant of the core; the samplers of a model share them.
_cache: WeakKeyDictionary[Transformer, dict[str, PackedWeights]] = WeakKeyDictionary()


def packed_weights(model: Transformer, core: Core) -> PackedWeights:
    """The weights in their smallest exact formats; computed once per model.

    Example:
        >>> packed_weights(model, load_core()).num_bytes
        96304128
    """
    by_variant = _cache.setdefault(model, {})
    if core.variant not in by_variant:
        by_variant[core.variant] = PackedWeights(
            tuple(
                tuple(pack_matrix(core, weight_OI) for weight_OI in _matrices(layer, model.arch))
                for layer in model.layers
            ),
            pack_matrix(core, model.unembedding_VD),
        )
    return by_variant[core.variant]


def plain_weights(model: Transformer) -> PackedWeights:
    """The weights unpacked, in torch's memory."""
    return PackedWeights(
        tuple(
            tuple(StoredMatrix(StorageFormat.FP32, weight_OI) for weight_OI in _matrices(layer, model.arch))
            for layer in model.layers
        ),
        StoredMatrix(StorageFormat.FP32, model.unembedding_VD),
    )


def layer_biases(weights: LayerWeights, arch: Architecture) -> list[Tensor | None]:
    """A layer's biases in the order of its matrices; None where there is none."""
    return [
        *_split(weights.qkv_bias_E, _qkv_sizes(arch)),
        weights.output_bias_D,
        *_split(weights.gate_up_bias_2F, [arch.intermediate_size] * 2),
        weights.down_bias_D,
    ]


def _matrices(weights: LayerWeights, arch: Architecture) -> Iterator[Tensor]:
    yield from weights.qkv_ED.split_with_sizes(_qkv_sizes(arch))
    yield weights.output_DHd
    yield from weights.gate_up_2FD.chunk(2)
    yield weights.down_DF


def _qkv_sizes(arch: Architecture) -> list[int]:
    kv_size = arch.num_kv_heads * arch.head_dim
    return [arch.num_heads * arch.head_dim, kv_size, kv_size]


def _split(fused: Tensor | None, sizes: list[int]) -> list[Tensor | None]:
    return [None] * len(sizes) if fused is None else list(fused.split_with_sizes(sizes))
