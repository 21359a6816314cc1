"""LoRA adapters: the trainable parameters of a model, in one flat buffer.

Shapes: T packed rows, R rank; ``in`` and ``out`` are a projection's input and output sizes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.lora_layout import (
    ATTENTION_MODULES,
    MLP_MODULES,
    UNEMBED_MODULE,
    LoraLayout,
    LoraSlot,
    LoraSpec,
)

__all__ = [
    "ATTENTION_MODULES",
    "MLP_MODULES",
    "UNEMBED_MODULE",
    "Adapter",
    "LoraLayout",
    "LoraRows",
    "LoraSlot",
    "LoraSpec",
]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: a spec, a layout and one flat fp32 buffer of parameters.

    Example:
        >>> adapter = Adapter.create(model.arch, LoraSpec(rank=8, seed=0))
        >>> leaf = adapter.with_params(adapter.params.clone().requires_grad_())
    """

    spec: LoraSpec
    layout: LoraLayout
    params: Tensor = field(repr=False)

    @classmethod
    def create(cls, arch: Architecture, spec: LoraSpec) -> Adapter:
        """A new adapter that does not change the outputs yet: A uniform in ±1/√in (Kaiming, a = √5), B zero."""
        generator = torch.Generator()
        if spec.seed is None:
            spec = replace(spec, seed=generator.seed() & 0x7FFF_FFFF)
        assert spec.seed is not None
        generator.manual_seed(_generator_seed(spec.seed))
        layout = LoraLayout.of(arch, spec)
        params = torch.zeros(layout.num_params, dtype=torch.float32)
        for slot in layout.slots:
            bound = 1 / math.sqrt(slot.in_features)
            params[slot.a_offset : slot.b_offset].uniform_(-bound, bound, generator=generator)
        return cls(spec, layout, params)

    def with_params(self, params: Tensor) -> Adapter:
        """The same adapter on another buffer of the same layout, without copying it."""
        if params.shape != (self.layout.num_params,):
            raise ValueError(
                f"this adapter has {self.layout.num_params} parameters, and the buffer has shape {tuple(params.shape)}"
            )
        return Adapter(self.spec, self.layout, params)

    @property
    def modules(self) -> frozenset[str]:
        """The names of the adapted modules."""
        return self.layout.modules

    @cached_property
    def views(self) -> Mapping[tuple[str, int | None], tuple[Tensor, Tensor]]:
        """A (R, in) and B (out, R) of every module, as views of ``params``.

        They come from one split, so that the backward pass concatenates all their gradients once.
        """
        rank = self.layout.rank
        pieces = iter(self.params.split_with_sizes(self.layout.split_sizes))
        return {
            (slot.module, slot.layer): (
                next(pieces).view(rank, slot.in_features),
                next(pieces).view(slot.out_features, rank),
            )
            for slot in self.layout.slots
        }


def _generator_seed(seed: int) -> int:
    """A seed for torch's generator, which uses 32 bits: longer and negative seeds are hashed."""
    if 0 <= seed < 1 << 32:
        return seed
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "little")


class LoraRows:
    """The adapter of each row of a packed batch; rows of one adapter are contiguous.

    Example:
        >>> rows = LoraRows([(alice, 120), (None, 16), (bob, 64)])
        >>> hidden_TD = model.hidden(tokens_T, positions_T, attend, rows)
    """

    def __init__(self, segments: Sequence[tuple[Adapter | None, int]]) -> None:
        self.segments = [(adapter, rows) for adapter, rows in segments if rows > 0]
        self.num_rows = sum(rows for _, rows in self.segments)
        self._row_counts = [rows for _, rows in self.segments]
        self._modules = frozenset[str]().union(
            *(adapter.modules for adapter, _ in self.segments if adapter is not None)
        )

    def apply(self, module: str, layer: int | None, x: Tensor, y: Tensor) -> Tensor:
        """``y`` plus each row's own ``scale · x Aᵀ Bᵀ``; ``y`` is (T, out), ``x`` is (T, in)."""
        if module not in self._modules:
            return y
        if len(self.segments) == 1:
            return _add_low_rank(self.segments[0][0], module, layer, x, y)
        pieces = zip(
            self.segments,
            x.split_with_sizes(self._row_counts),
            y.split_with_sizes(self._row_counts),
            strict=True,
        )
        return torch.cat(
            [_add_low_rank(adapter, module, layer, x_rows, y_rows) for (adapter, _), x_rows, y_rows in pieces]
        )


def _add_low_rank(adapter: Adapter | None, module: str, layer: int | None, x: Tensor, y: Tensor) -> Tensor:
    pair = None if adapter is None else adapter.views.get((module, layer))
    if adapter is None or pair is None:
        return y
    a, b = pair
    return torch.addmm(y, x @ a.T, b.T, alpha=adapter.spec.scale)
