"""Keys and values of running sequences, and attention over them.

* ``PromptKV`` holds one prompt. It is filled chunk by chunk during prefill and does not change afterwards, so any number
  of sequences, and later requests, can continue it.
* ``SlotTable`` holds one slot per decoding sequence for torch. Sequences are added and removed between steps, and a
  sequence that fills its slot moves to a larger one. Slots of one capacity are contiguous in a bank, so that a decode
  step is one attention call per bank. The compiled core uses the blocks of ``block_table`` instead.

A slot's capacity is a power of two, so at most twice what it holds. A bank allocates at most half as many slots again as
were in use simultaneously, and while it grows, its old and new storage exist together. The sampler decides who may
allocate.

Shapes: L layers, S slots of a bank, K key/value heads, H heads, C capacity of a slot, P prompt length,
T packed rows, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from tinkex.engine.sampler.limits import SlotSizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.model.attention import Attend

__all__ = ["PromptKV", "Slot", "SlotTable", "bytes_per_token", "prefill_attend"]


def bytes_per_token(arch: Architecture, dtype: torch.dtype) -> int:
    """How many bytes the keys and values of one token take, over all layers."""
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * dtype.itemsize


class PromptKV:
    """The keys and values of one prompt under one adapter; the first ``filled`` tokens are computed."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, length: int) -> None:
        self.length = length
        self.filled = 0
        self.last_hidden_D: Tensor | None = None
        """The hidden state of the last token, once all are computed: it predicts the first new token."""
        self.kv_L2KPd = torch.empty(arch.num_layers, 2, arch.num_kv_heads, length, arch.head_dim, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.kv_L2KPd.nbytes

    @property
    def complete(self) -> bool:
        """Whether every token is computed, so that sequences can continue the prompt."""
        return self.last_hidden_D is not None

    def copy_prefix(self, other: PromptKV, length: int) -> None:
        """Copies the first ``length`` tokens from another prompt with the same prefix."""
        assert self.filled == 0
        assert length <= other.filled
        self.kv_L2KPd[:, :, :, :length] = other.kv_L2KPd[:, :, :, :length]
        self.filled = length


def prefill_attend(pieces: Sequence[tuple[PromptKV, int]], arch: Architecture) -> Attend:
    """Attention for the next rows of several prompts: ``(prompt, number of new rows)``, packed in this order.

    Each layer appends its keys and values after the ``filled`` tokens. The caller updates ``filled`` after the pass, so a
    pass that fails can be repeated.

    Example:
        >>> attend = prefill_attend([(prompt_a, 512), (prompt_b, 40)], arch)
        >>> hidden_TD = model.hidden(tokens_T, positions_T, attend)
    """
    counts = [count for _, count in pieces]
    masks: dict[tuple[int, int | None], tuple[int, Tensor | None]] = {}

    def visible(index: int, window: int | None) -> tuple[int, Tensor | None]:
        if (index, window) not in masks:
            prompt, count = pieces[index]
            masks[index, window] = _visible_keys(prompt.filled, count, window)
        return masks[index, window]

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        window = arch.window(layer)
        outputs = []
        rows = zip(*(torch.split(packed, counts) for packed in (q_THd, k_TKd, v_TKd)), strict=True)
        for index, (q, k, v) in enumerate(rows):
            prompt, count = pieces[index]
            start, end = prompt.filled, prompt.filled + count
            keys_KPd, values_KPd = prompt.kv_L2KPd[layer]
            keys_KPd[:, start:end] = k.transpose(0, 1)
            values_KPd[:, start:end] = v.transpose(0, 1)
            first, mask = visible(index, window)
            out_1Hcd = scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                keys_KPd[None, :, first:end],
                values_KPd[None, :, first:end],
                attn_mask=mask,
                is_causal=mask is None and count > 1,
                enable_gqa=True,
            )
            outputs.append(out_1Hcd[0].transpose(0, 1))
        return torch.cat(outputs)

    return attend


def _visible_keys(filled: int, count: int, window: int | None) -> tuple[int, Tensor | None]:
    """The first key that any of ``count`` new rows sees, and the mask; None if causal attention needs no mask."""
    first = 0 if window is None else max(0, filled - window + 1)
    if count == 1 or (filled == 0 and (window is None or window >= count)):
        return first, None
    queries = torch.arange(filled, filled + count)[:, None]
    keys = torch.arange(first, filled + count)[None, :]
    visible = keys <= queries
    return first, visible if window is None else visible & (keys > queries - window)


@dataclass(eq=False)
class Slot:
    """The slot of one decoding sequence: a row of a bank, and how many tokens the sequence has."""

    bank: _Bank
    index: int
    length: int

    @property
    def shared(self) -> None:
        """None: a slot holds a copy of the whole prompt."""

    @property
    def own_length(self) -> int:
        """How many tokens the slot itself holds."""
        return self.length


class _Bank:
    """Slots of one capacity. Those in use come first, so that a view of them is contiguous.

    Values after a slot's length are masked, but must be finite: torch's attention multiplies them by zero.
    """

    def __init__(self, arch: Architecture, dtype: torch.dtype, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[Slot] = []
        self.kv_L2SKCd = torch.zeros(
            arch.num_layers, 2, 0, arch.num_kv_heads, capacity, arch.head_dim, dtype=dtype
        )

    @property
    def nbytes(self) -> int:
        return self.kv_L2SKCd.nbytes

    @property
    def slot_bytes(self) -> int:
        layers, _, _, heads, capacity, head_dim = self.kv_L2SKCd.shape
        return 2 * layers * heads * capacity * head_dim * self.kv_L2SKCd.element_size()

    @property
    def next_growth(self) -> int:
        """How many slots are allocated for one more sequence: none if one is free, else half as many again."""
        allocated = self.kv_L2SKCd.shape[2]
        return 0 if len(self.slots) < allocated else max(1, allocated // 2)

    def take(self, kv_L2KPd: Tensor, length: int) -> Slot:
        """A new slot with a copy of the first ``length`` tokens of ``kv_L2KPd``."""
        self._resize(self.kv_L2SKCd.shape[2] + self.next_growth)
        slot = Slot(self, len(self.slots), length)
        self.slots.append(slot)
        row_L2KCd = self.kv_L2SKCd[:, :, slot.index]
        row_L2KCd[:, :, :, :length] = kv_L2KPd[:, :, :, :length]
        row_L2KCd[:, :, :, length:] = 0
        return slot

    def free(self, slot: Slot) -> None:
        """Frees a slot; the last one moves to its index."""
        last = self.slots.pop()
        if last is not slot:
            self.kv_L2SKCd[:, :, slot.index] = self.kv_L2SKCd[:, :, last.index]
            last.index = slot.index
            self.slots[slot.index] = last
        if len(self.slots) * 4 <= self.kv_L2SKCd.shape[2]:
            self._resize(2 * len(self.slots))

    def trim(self) -> None:
        """Frees the memory of slots that are not in use."""
        self._resize(len(self.slots))

    def _resize(self, num_slots: int) -> None:
        layers, two, allocated, heads, capacity, head_dim = self.kv_L2SKCd.shape
        if num_slots == allocated:
            return
        old, in_use = self.kv_L2SKCd, len(self.slots)
        self.kv_L2SKCd = torch.zeros(layers, two, num_slots, heads, capacity, head_dim, dtype=old.dtype)
        self.kv_L2SKCd[:, :, :in_use] = old[:, :, :in_use]


class SlotTable:
    """The slots of all decoding sequences.

    Example:
        >>> slot = table.add(prompt)
        >>> table.grow(slot)  # where table.is_full(slot)
        >>> hidden_BD = model.hidden(tokens_B, positions_B, table.attend([slot]))
        >>> slot.length += 1
    """

    def __init__(self, arch: Architecture, dtype: torch.dtype) -> None:
        self._arch = arch
        self._dtype = dtype
        self.sizes = SlotSizes(paged=False)
        self._banks: list[_Bank] = []

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(bank.nbytes for bank in self._banks)

    def __len__(self) -> int:
        return sum(len(bank.slots) for bank in self._banks)

    def cost(self, length: int) -> int:
        """Bytes that would be allocated for a sequence of this length, with room for one more token."""
        bank = self._find(length)
        if bank is None:
            return self.sizes.capacity(length) * bytes_per_token(self._arch, self._dtype)
        return bank.next_growth * bank.slot_bytes

    def add(self, prompt: PromptKV) -> Slot:
        """A slot for a new sequence that continues ``prompt``, with a copy of it."""
        return self._bank(prompt.length).take(prompt.kv_L2KPd, prompt.length)

    def remove(self, slot: Slot) -> None:
        """Frees a sequence's slot."""
        slot.bank.free(slot)
        if not slot.bank.slots:
            self._banks.remove(slot.bank)

    def is_full(self, slot: Slot) -> bool:
        """Whether the slot must grow before it can hold another token."""
        return slot.length == slot.bank.capacity

    def grow(self, slot: Slot) -> None:
        """Moves a sequence to a larger slot; the slot object stays the same."""
        old = slot.bank
        moved = self._bank(slot.length).take(old.kv_L2SKCd[:, :, slot.index], slot.length)
        old.free(slot)
        if not old.slots:
            self._banks.remove(old)
        slot.bank, slot.index = moved.bank, moved.index
        slot.bank.slots[slot.index] = slot

    def trim(self) -> None:
        """Frees slots that are not in use."""
        for bank in self._banks:
            bank.trim()

    def attend(self, slots: Sequence[Slot]) -> Attend:
        """Attention for one new row per slot; ``slots`` are all slots of the table, in the order of the rows.

        Each layer appends its keys and values to the slot. The caller updates ``length`` after the pass, so a pass that
        fails can be repeated.
        """
        assert len(slots) == len(self)
        row_of = {id(slot): row for row, slot in enumerate(slots)}
        parts = [
            _BankRows(bank, [row_of[id(slot)] for slot in bank.slots]) for bank in self._banks if bank.slots
        ]

        def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            window = self._arch.window(layer)
            if len(parts) == 1 and parts[0].in_order:
                return parts[0].attend(layer, window, q_THd, k_TKd, v_TKd)
            out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
            for part in parts:
                rows = part.rows
                out_THd[rows] = part.attend(layer, window, q_THd[rows], k_TKd[rows], v_TKd[rows])
            return out_THd

        return attend

    def _find(self, length: int) -> _Bank | None:
        """The bank for a sequence of this length, if there is one."""
        capacity = self.sizes.capacity(length)
        return next((bank for bank in self._banks if bank.capacity == capacity), None)

    def _bank(self, length: int) -> _Bank:
        bank = self._find(length)
        if bank is None:
            bank = _Bank(self._arch, self._dtype, self.sizes.capacity(length))
            self._banks.append(bank)
        return bank


class _BankRows:
    """The rows of a decode step in one bank, and the mask of each."""

    def __init__(self, bank: _Bank, rows: list[int]) -> None:
        self.bank = bank
        self.in_order = rows == list(range(len(rows)))
        self.rows = torch.tensor(rows)
        self.lengths = [slot.length for slot in bank.slots]
        self.lengths_S = torch.tensor(self.lengths)
        self.indices_S = torch.arange(len(rows))
        self._masks: dict[int | None, tuple[int, Tensor | None]] = {}

    def attend(self, layer: int, window: int | None, q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor) -> Tensor:
        keys_SKCd, values_SKCd = self.bank.kv_L2SKCd[layer, :, : len(self.lengths)]
        keys_SKCd[self.indices_S, :, self.lengths_S] = k_SKd
        values_SKCd[self.indices_S, :, self.lengths_S] = v_SKd
        first, mask = self._visible(window)
        end = max(self.lengths) + 1
        out_SH1d = scaled_dot_product_attention(
            q_SHd[:, :, None],
            keys_SKCd[:, :, first:end],
            values_SKCd[:, :, first:end],
            attn_mask=mask,
            enable_gqa=True,
        )
        return out_SH1d[:, :, 0]

    def _visible(self, window: int | None) -> tuple[int, Tensor | None]:
        """The first key that any row sees, and an additive mask; None if every row sees all keys."""
        if window not in self._masks:
            shortest, longest = min(self.lengths), max(self.lengths)
            first = 0 if window is None else max(0, shortest + 1 - window)
            mask = None
            if shortest != longest:
                keys = torch.arange(first, longest + 1)[None, :]
                queries = self.lengths_S[:, None]
                hidden = keys > queries
                if window is not None:
                    hidden |= keys <= queries - window
                mask_S11C = torch.zeros(hidden.shape, dtype=self.bank.kv_L2SKCd.dtype).masked_fill_(
                    hidden, -torch.inf
                )
                mask = mask_S11C[:, None, None, :]
            self._masks[window] = (first, mask)
        return self._masks[window]
