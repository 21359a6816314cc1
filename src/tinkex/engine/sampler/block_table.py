"""Keys and values of decoding sequences in blocks, for the compiled core.

A sequence reads the whole blocks of its prompt where they lie, together with all others that go on from it, and has
blocks of its own for what follows. It never moves: when its last block is full it gets another. So it takes what it
holds, less than one block more, and the copy of its prompt's last, unfinished block.

Shapes: L layers, K key/value heads, C tokens of a block, P prompt length, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tinkex.engine.sampler.kv_cache import bytes_per_token
from tinkex.engine.sampler.limits import SLOT_STEP, SlotSizes

if TYPE_CHECKING:
    from ctypes import Array

    from torch import Tensor

    from tinkex.engine.kernels.layout import StretchC
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.sampler.kv_cache import PromptKV

__all__ = ["BlockSlot", "BlockTable"]


@dataclass(eq=False)
class BlockSlot:
    """One decoding sequence's blocks, and how many tokens the sequence has."""

    length: int
    shared: PromptKV | None = None
    """The prompt that holds the first tokens for all sequences that go on from it."""
    start: int = 0
    """How many tokens ``shared`` holds; the blocks have those from here on."""
    blocks_L2KCd: list[Tensor] = field(default_factory=list, repr=False)
    described: Array[StretchC] | None = field(default=None, repr=False)
    """Where everything lies, as the core is told; worked out again after a block was added."""

    @property
    def own_length(self) -> int:
        """How many tokens the sequence has in blocks of its own."""
        return self.length - self.start


class BlockTable:
    """The blocks of all decoding sequences.

    Example:
        >>> slot = table.join(prompt)
        >>> table.grow(slot)  # where table.is_full(slot)
        >>> hidden_BD = compute.decode(tokens, table, [slot], segments)
        >>> slot.length += 1
    """

    def __init__(self, arch: Architecture, dtype: torch.dtype) -> None:
        self._shape = (arch.num_layers, 2, arch.num_kv_heads, SLOT_STEP, arch.head_dim)
        self._dtype = dtype
        self._block_bytes = SLOT_STEP * bytes_per_token(arch, dtype)
        self._num_slots = 0
        self._num_blocks = 0
        self.sizes = SlotSizes(apart=True)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._num_blocks * self._block_bytes

    def __len__(self) -> int:
        return self._num_slots

    def cost(self, length: int) -> int:  # noqa: ARG002 -- slots side by side have to know it
        """Bytes that would be allocated for a new sequence, or for one that grows: a block."""
        return self._block_bytes

    def join(self, prompt: PromptKV) -> BlockSlot:
        """A place for a new sequence that goes on from ``prompt``; if it is ``shared``, the prompt must stay."""
        start = prompt.length - self.sizes.own_length(prompt.length)
        slot = BlockSlot(prompt.length, prompt if start else None, start)
        self.grow(slot)
        self._num_slots += 1
        slot.blocks_L2KCd[0][:, :, :, : slot.own_length] = prompt.kv_L2KPd[:, :, :, start:]
        return slot

    def leave(self, slot: BlockSlot) -> None:
        """Gives a sequence's blocks back."""
        self._num_slots -= 1
        self._num_blocks -= len(slot.blocks_L2KCd)
        slot.blocks_L2KCd.clear()
        slot.described = slot.shared = None

    def is_full(self, slot: BlockSlot) -> bool:
        """Whether the sequence must grow before it can take another token."""
        return slot.own_length == SLOT_STEP * len(slot.blocks_L2KCd)

    def grow(self, slot: BlockSlot) -> None:
        """Gives a sequence another block."""
        slot.blocks_L2KCd.append(torch.empty(self._shape, dtype=self._dtype))
        slot.described = None
        self._num_blocks += 1

    def trim(self) -> None:
        """Gives back what nobody uses: blocks are given back when a sequence ends, so that is nothing."""
