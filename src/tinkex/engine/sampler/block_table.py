"""Keys and values of decoding sequences in blocks, for the compiled core: a paged KV cache.

A sequence reads the full blocks of its prompt in place, as all other continuations of that prompt do, and has its own
blocks for the tokens after them. Nothing is moved: when its last block is full, it gets another. A sequence therefore
allocates less than one block more than it holds, plus the copy of its prompt's last, partial block.

Shapes: L layers, K key/value heads, C tokens of a block, P prompt length, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tinkex.engine.sampler.kv_cache import bytes_per_token
from tinkex.engine.sampler.limits import BLOCK_TOKENS, SlotSizes

if TYPE_CHECKING:
    from ctypes import Array

    from torch import Tensor

    from tinkex.engine.kernels.layout import ExtentC
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.sampler.kv_cache import PromptKV

__all__ = ["BlockSlot", "BlockTable"]


@dataclass(eq=False)
class BlockSlot:
    """One decoding sequence's blocks, and how many tokens the sequence has."""

    length: int
    shared: PromptKV | None = None
    """The prompt whose full blocks all its continuations share."""
    start: int = 0
    """How many tokens are read from ``shared``; the blocks hold those from here on."""
    blocks_L2KCd: list[Tensor] = field(default_factory=list, repr=False)
    extents: Array[ExtentC] | None = field(default=None, repr=False)
    """The memory of all tokens, as the core reads it; None after a block was added."""

    @property
    def own_length(self) -> int:
        """How many tokens the sequence has in its own blocks."""
        return self.length - self.start


class BlockTable:
    """The blocks of all decoding sequences.

    Example:
        >>> slot = table.add(prompt)
        >>> table.grow(slot)  # where table.is_full(slot)
        >>> hidden_BD = compute.decode(tokens, table, [slot], segments)
        >>> slot.length += 1
    """

    def __init__(self, arch: Architecture, dtype: torch.dtype) -> None:
        self._shape = (arch.num_layers, 2, arch.num_kv_heads, BLOCK_TOKENS, arch.head_dim)
        self._dtype = dtype
        self._block_bytes = BLOCK_TOKENS * bytes_per_token(arch, dtype)
        self._num_slots = 0
        self._num_blocks = 0
        self.sizes = SlotSizes(paged=True)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._num_blocks * self._block_bytes

    def __len__(self) -> int:
        return self._num_slots

    def cost(self, length: int) -> int:  # noqa: ARG002 -- a SlotTable needs it
        """Bytes that would be allocated for a new sequence, or for one that grows: a block."""
        return self._block_bytes

    def add(self, prompt: PromptKV) -> BlockSlot:
        """A slot for a new sequence that continues ``prompt``, which must stay in memory if the slot has it ``shared``."""
        start = prompt.length - self.sizes.own_length(prompt.length)
        slot = BlockSlot(prompt.length, prompt if start else None, start)
        self.grow(slot)
        self._num_slots += 1
        slot.blocks_L2KCd[0][:, :, :, : slot.own_length] = prompt.kv_L2KPd[:, :, :, start:]
        return slot

    def remove(self, slot: BlockSlot) -> None:
        """Frees a sequence's blocks."""
        self._num_slots -= 1
        self._num_blocks -= len(slot.blocks_L2KCd)
        slot.blocks_L2KCd.clear()
        slot.extents = slot.shared = None

    def is_full(self, slot: BlockSlot) -> bool:
        """Whether the slot must grow before it can hold another token."""
        return slot.own_length == BLOCK_TOKENS * len(slot.blocks_L2KCd)

    def grow(self, slot: BlockSlot) -> None:
        """Allocates another block for a sequence."""
        slot.blocks_L2KCd.append(torch.empty(self._shape, dtype=self._dtype))
        slot.extents = None
        self._num_blocks += 1

    def trim(self) -> None:
        """Does nothing: ``remove`` frees the blocks of a sequence."""
