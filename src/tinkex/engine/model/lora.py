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
from tinkex.errors import InvalidInput

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

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
UNEMBED_MODULE = "lm_head"


@dataclass(frozen=True)
class LoraSpec:
    """The configuration of an adapter: its rank, its seed and the parts of the model that it adapts.

    ``seed=None`` draws one; ``Adapter.create`` records it, so that a run can be repeated.

    Example:
        >>> LoraSpec(rank=8, seed=0).scale
        4.0
    """

    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    alpha: float = 32.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidInput(f"LoRA rank must be at least 1, and is {self.rank}")
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            raise InvalidInput(
                "LoRA trains nothing: set at least one of train_mlp, train_attn and train_unembed"
            )

    @property
    def scale(self) -> float:
        """The factor of the low-rank product."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class LoraSlot:
    """The offsets of one projection's A (R, in) and B (out, R) in the flat buffer."""

    module: str
    layer: int | None  # None for the unembedding
    in_features: int
    out_features: int
    a_offset: int
    b_offset: int


@dataclass(frozen=True)
class LoraLayout:
    """The order of an adapter's parameters: layer by layer, module by module, A then B.

    Example:
        >>> layout = LoraLayout.of(arch, LoraSpec(rank=8))
        >>> layout.slots[0].module, layout.slots[-1].module
        ('q_proj', 'lm_head')
    """

    rank: int
    slots: tuple[LoraSlot, ...]
    num_params: int

    @classmethod
    def of(cls, arch: Architecture, spec: LoraSpec) -> LoraLayout:
        """The layout of every adapter with this spec on models of this architecture."""
        q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        hidden, inner = arch.hidden_size, arch.intermediate_size
        attention = [
            ("q_proj", hidden, q_size),
            ("k_proj", hidden, kv_size),
            ("v_proj", hidden, kv_size),
            ("o_proj", q_size, hidden),
        ]
        mlp = [("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden)]
        per_layer = (attention if spec.train_attn else []) + (mlp if spec.train_mlp else [])
        sizes: list[tuple[str, int | None, int, int]] = [
            (name, layer, fan_in, fan_out)
            for layer in range(arch.num_layers)
            for name, fan_in, fan_out in per_layer
        ]
        if spec.train_unembed:
            sizes.append((UNEMBED_MODULE, None, hidden, arch.vocab_size))
        slots, offset = [], 0
        for name, layer, fan_in, fan_out in sizes:
            b_offset = offset + spec.rank * fan_in
            slots.append(LoraSlot(name, layer, fan_in, fan_out, offset, b_offset))
            offset = b_offset + fan_out * spec.rank
        return cls(rank=spec.rank, slots=tuple(slots), num_params=offset)

    @cached_property
    def modules(self) -> frozenset[str]:
        """The names of the adapted modules."""
        return frozenset(slot.module for slot in self.slots)

    @cached_property
    def split_sizes(self) -> list[int]:
        """The sizes of A, B, A, B, … in the flat buffer."""
        return [
            size
            for slot in self.slots
            for size in (self.rank * slot.in_features, slot.out_features * self.rank)
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
