"""The weights of a model as the compiled core reads them: in the smallest form that gives back the same fp32 numbers.

A checkpoint that was rounded to 16 bits, or quantised in blocks as GGUF files are, holds less than its fp32 numbers
take. A decode step reads every weight once, so it takes about as long as their bytes do. Which form a matrix has is
found from its numbers alone: every one of them is tried, and a form is used only if all come out as they went in.

Shapes: D hidden, V vocabulary, O outputs and I inputs of a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from tinkex.engine.kernels.layout import MatrixC, Stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tinkex.engine.kernels import Core
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.model.transformer import LayerWeights, Transformer

__all__ = ["Matrix", "PackedWeights", "layer_biases", "pack_matrix", "packed_weights", "plain_weights"]

_SMALLEST_FIRST = (Stored.Q4, Stored.Q8, Stored.BF16, Stored.FP16)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix as the core reads it; ``data`` is torch's own memory where it is fp32."""

    stored: Stored
    data: Tensor

    @property
    def as_c(self) -> MatrixC:
        """What the core is told; this object must outlive it."""
        return MatrixC(self.data.data_ptr(), self.stored)


def pack_matrix(core: Core, weight_OI: Tensor) -> Matrix:
    """The matrix in the smallest form that loses nothing; as it is where there is none.

    Example:
        >>> pack_matrix(load_core(), torch.ones(64, 64)).stored
        <Stored.Q4: 4>
    """
    assert weight_OI.dtype == torch.float32
    assert weight_OI.is_contiguous(), "weights are stored row by row"
    outputs, inputs = weight_OI.shape
    for stored in _SMALLEST_FIRST:
        size = core.packed_bytes(stored, outputs, inputs)
        if not size:
            continue
        data = torch.empty(size, dtype=torch.uint8)
        threads = torch.get_num_threads()
        if core.pack(weight_OI.data_ptr(), outputs, inputs, stored, data.data_ptr(), threads):
            return Matrix(stored, data)
    return Matrix(Stored.FP32, weight_OI)


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """The matrices of a model, those of a layer in the order query, key, value, output, gate, up, down."""

    layers: tuple[tuple[Matrix, ...], ...]
    unembedding: Matrix

    @property
    def num_bytes(self) -> int:
        """What they take up beside the model: those that stay as they are take nothing."""
        matrices = [self.unembedding, *(matrix for layer in self.layers for matrix in layer)]
        return sum(matrix.data.nbytes for matrix in matrices if matrix.stored is not Stored.FP32)


# By model and then by variant of the core: a model's samplers share them.
_known: WeakKeyDictionary[Transformer, dict[str, PackedWeights]] = WeakKeyDictionary()


def packed_weights(model: Transformer, core: Core) -> PackedWeights:
    """The weights in the smallest form that gives the same numbers; worked out once per model.

    Example:
        >>> packed_weights(model, load_core()).num_bytes
        96304128
    """
    by_variant = _known.setdefault(model, {})
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
    """The weights where torch keeps them."""
    return PackedWeights(
        tuple(
            tuple(Matrix(Stored.FP32, weight_OI) for weight_OI in _matrices(layer, model.arch))
            for layer in model.layers
        ),
        Matrix(Stored.FP32, model.unembedding_VD),
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


def _split(joined: Tensor | None, sizes: list[int]) -> list[Tensor | None]:
    return [None] * len(sizes) if joined is None else list(joined.split_with_sizes(sizes))
