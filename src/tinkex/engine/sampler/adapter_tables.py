"""Pointers to an adapter's LoRA matrices for the compiled core: to torch's memory, or to a transposed copy.

The core multiplies panels of columns, into which it transposes the rows of a matrix during the product. That costs little
if many rows share an adapter, and a third of the product if four do. An adapter that is used often for few rows therefore
gets a transposed copy, as long as the copies of all adapters stay within ``max_bytes``. Both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch

from tinkex.engine.kernels.layout import LoraC, StorageFormat
from tinkex.engine.model.lora import ATTENTION_MODULES, MLP_MODULES, UNEMBED_MODULE
from tinkex.engine.model.memory import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from ctypes import Array

    from torch import Tensor

    from tinkex.engine.kernels import Core
    from tinkex.engine.model.lora import Adapter
    from tinkex.engine.model.transformer import Transformer

__all__ = ["AdapterTable", "AdapterTables", "adapter_tables"]

MAX_ROWS = 8
"""Transposed copies are used for up to this many rows: there, transposing takes a large part of the product."""
MIN_USES = 32
"""Uses for few rows before a copy is made: a sample of a few tokens would not amortize it."""
RECENT_USES = 1000
"""A copy can be evicted if it was not among this many most recent uses of all adapters."""
MAX_PADDING = 1.5
"""How much larger than its adapter a copy may be: low ranks are padded to whole panels with zeros, which are read too."""
MAX_BYTES = 512 * 2**20


@dataclass(frozen=True, eq=False)
class AdapterTable:
    """An adapter's LoRA matrices as the core reads them; ``copies`` must outlive the calls that read them."""

    loras: Array[LoraC]
    copies: Sequence[Tensor] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self.copies)


@dataclass(eq=False)
class _Entry:
    adapter: ref[Adapter]
    plain: AdapterTable
    transposed: AdapterTable | None = None
    num_uses: int = 0
    last_use: int = 0


class AdapterTables:
    """The tables of a model's adapters, each made at first use and dropped with its adapter.

    Example:
        >>> tables = AdapterTables(core, num_layers=30)
        >>> tables.get(adapter, num_rows=4).loras
        <tinkex.engine.sampler.adapter_tables.LoraC_Array_211 object at ...>
    """

    def __init__(
        self, core: Core, num_layers: int, *, min_uses: int = MIN_USES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._core = core
        self._modules: list[tuple[str, int | None]] = [
            (module, layer) for layer in range(num_layers) for module in (*ATTENTION_MODULES, *MLP_MODULES)
        ]
        self._modules.append((UNEMBED_MODULE, None))
        self._min_uses = min_uses
        self._max_bytes = max_bytes
        self._entries: dict[int, _Entry] = {}
        self._num_uses = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all transposed copies."""
        return sum(
            entry.transposed.num_bytes for entry in self._entries.values() if entry.transposed is not None
        )

    def get(self, adapter: Adapter, num_rows: int) -> AdapterTable:
        """The table of an adapter for a product with ``num_rows`` rows."""
        key = id(adapter)
        entry = self._entries.get(key)
        if entry is None:
            weak = ref(adapter, lambda _: self._entries.pop(key, None))
            entry = self._entries[key] = _Entry(weak, self._plain(adapter))
        if num_rows > MAX_ROWS:
            return entry.plain
        self._num_uses += 1
        entry.num_uses += 1
        entry.last_use = self._num_uses
        if entry.transposed is None and entry.num_uses > self._min_uses:
            entry.num_uses = 0  # without a copy now, it is tried again after as many uses
            if self._make_room(adapter):
                entry.transposed = self._try_transposed(adapter)
        return entry.transposed or entry.plain

    def _make_room(self, adapter: Adapter) -> bool:
        """Evicts copies that were not used recently; returns whether a copy of ``adapter`` pays and fits."""
        needed = sum(self._transposed_bytes(matrix) for pair in adapter.views.values() for matrix in pair)
        if needed > MAX_PADDING * adapter.params.nbytes:
            return False
        room = self._max_bytes - self.num_bytes - needed
        for entry in sorted(self._entries.values(), key=lambda entry: entry.last_use):
            if room < 0 and entry.transposed is not None and self._num_uses - entry.last_use > RECENT_USES:
                room += entry.transposed.num_bytes
                entry.transposed = None
                entry.num_uses = 0
        return room >= 0

    def _plain(self, adapter: Adapter) -> AdapterTable:
        table = AdapterTable((LoraC * len(self._modules))())
        for lora, module in zip(table.loras, self._modules, strict=True):
            pair = adapter.views.get(module)
            if pair is not None:
                lora.a, lora.b = (matrix.data_ptr() for matrix in pair)
        return table

    def _try_transposed(self, adapter: Adapter) -> AdapterTable | None:
        """A transposed copy, or None without memory for it: a copy only saves time."""
        try:
            return self._transposed(adapter)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _transposed(self, adapter: Adapter) -> AdapterTable:
        loras, copies = (LoraC * len(self._modules))(), []
        for lora, module in zip(loras, self._modules, strict=True):
            pair = adapter.views.get(module)
            if pair is not None:
                transposed = [self._transpose(matrix) for matrix in pair]
                copies += transposed
                lora.a, lora.b = (matrix.data_ptr() for matrix in transposed)
                lora.transposed = 1
        return AdapterTable(loras, copies)

    def _transposed_bytes(self, matrix: Tensor) -> int:
        return self._core.packed_bytes(StorageFormat.TRANSPOSED, *matrix.shape)

    def _transpose(self, matrix: Tensor) -> Tensor:
        outputs, inputs = matrix.shape
        data = torch.empty(self._transposed_bytes(matrix), dtype=torch.uint8)
        threads = torch.get_num_threads()
        self._core.pack(
            matrix.data_ptr(), outputs, inputs, StorageFormat.TRANSPOSED, data.data_ptr(), threads
        )
        return data


_tables: WeakKeyDictionary[Transformer, dict[str, AdapterTables]] = WeakKeyDictionary()


def adapter_tables(model: Transformer, core: Core) -> AdapterTables:
    """The tables of a model's adapters, which all its samplers share.

    Example:
        >>> adapter_tables(model, load_core()).num_bytes
        0
    """
    by_variant = _tables.setdefault(model, {})
    if core.variant not in by_variant:
        by_variant[core.variant] = AdapterTables(core, len(model.layers))
    return by_variant[core.variant]
