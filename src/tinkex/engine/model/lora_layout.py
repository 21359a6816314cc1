"""The layout of LoRA adapters: which projections they adapt, and the order and number of their parameters.

Without torch, so that the size of a run is known where no weights are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinkex.engine.model.architecture import Architecture
from tinkex.errors import InvalidInput
from tinkex.types.training import LoraConfig

__all__ = [
    "ATTENTION_MODULES",
    "MLP_MODULES",
    "STATE_BUFFERS",
    "UNEMBED_MODULE",
    "LoraLayout",
    "LoraSlot",
    "LoraSpec",
    "state_bytes",
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


STATE_BUFFERS = 4  # weights, gradient, and Adam's two moments
_FLOAT32_BYTES = 4


def state_bytes(arch: Architecture, lora: LoraConfig) -> int:
    """The memory of a run that trains an adapter: its weights, gradient and both moments of Adam.

    Example:
        >>> state_bytes(arch, LoraConfig(rank=32))
        181764096
    """
    return _state_bytes(arch, lora.rank, lora.train_mlp, lora.train_attn, lora.train_unembed)


@lru_cache(256)
def _state_bytes(arch: Architecture, rank: int, *trains: bool) -> int:
    train_mlp, train_attn, train_unembed = trains
    spec = LoraSpec(rank, train_mlp=train_mlp, train_attn=train_attn, train_unembed=train_unembed)
    return LoraLayout.of(arch, spec).num_params * STATE_BUFFERS * _FLOAT32_BYTES
