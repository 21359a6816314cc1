"""Where the compiled core finds an adapter's pairs: where torch keeps them, or in a copy that is turned for it.

The core multiplies panels of columns, into which it turns the rows of a matrix on the way. That costs little where many
rows share an adapter, and a third of the product where four do. An adapter that is used for few rows again and again
therefore gets a turned copy, as long as the copies of all adapters stay within ``most_bytes``. Both ways give the same
bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch

from tinkex.engine.kernels.layout import PairC, Stored
from tinkex.engine.model.lora import ATTENTION_MODULES, MLP_MODULES, UNEMBED_MODULE
from tinkex.engine.model.memory import out_of_memory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from ctypes import Array

    from torch import Tensor

    from tinkex.engine.kernels import Core
    from tinkex.engine.model.lora import Adapter
    from tinkex.engine.model.transformer import Transformer

__all__ = ["AdapterTable", "AdapterTables", "adapter_tables"]

FEW_ROWS = 8
"""Up to as many rows, turning a matrix takes a good part of the product with it."""
USES_BEFORE = 32
"""Uses for few rows after which a copy is made: for a sample of a few tokens it would not pay."""
RECENT_USES = 1000
"""A copy that was not used among so many last uses of any makes room for another."""
MOST_FILLING = 1.5
"""How much larger than its adapter a copy may be: panels of low ranks are filled up with zeros, which are read too."""
MOST_BYTES = 512 * 2**20


@dataclass(frozen=True, eq=False)
class AdapterTable:
    """An adapter's pairs as the core reads them; ``copies`` must outlive what the core does with them."""

    pairs: Array[PairC]
    copies: Sequence[Tensor] = ()

    @property
    def num_bytes(self) -> int:
        """What the copies take up."""
        return sum(copy.nbytes for copy in self.copies)


@dataclass(eq=False)
class _Known:
    adapter: ref[Adapter]
    plain: AdapterTable
    turned: AdapterTable | None = None
    num_uses: int = 0
    last_use: int = 0


class AdapterTables:
    """The tables of a model's adapters, each made when it is first asked for and forgotten with its adapter.

    Example:
        >>> tables = AdapterTables(core, num_layers=30)
        >>> tables.of(adapter, num_rows=4).pairs
        <tinkex.engine.sampler.adapter_tables.PairC_Array_211 object at ...>
    """

    def __init__(
        self, core: Core, num_layers: int, *, uses_before: int = USES_BEFORE, most_bytes: int = MOST_BYTES
    ) -> None:
        self._core = core
        self._modules: list[tuple[str, int | None]] = [
            (module, layer) for layer in range(num_layers) for module in (*ATTENTION_MODULES, *MLP_MODULES)
        ]
        self._modules.append((UNEMBED_MODULE, None))
        self._uses_before = uses_before
        self._most_bytes = most_bytes
        self._known: dict[int, _Known] = {}
        self._num_uses = 0

    @property
    def num_bytes(self) -> int:
        """What all turned copies take up."""
        return sum(known.turned.num_bytes for known in self._known.values() if known.turned is not None)

    def of(self, adapter: Adapter, num_rows: int) -> AdapterTable:
        """The table of an adapter for so many rows."""
        key = id(adapter)
        known = self._known.get(key)
        if known is None:
            forget = ref(adapter, lambda _: self._known.pop(key, None))
            known = self._known[key] = _Known(forget, self._plain(adapter))
        if num_rows > FEW_ROWS:
            return known.plain
        self._num_uses += 1
        known.num_uses += 1
        known.last_use = self._num_uses
        if known.turned is None and known.num_uses > self._uses_before:
            known.num_uses = 0  # where it gets no copy now, that is looked at again after as many uses
            if self._make_room(adapter):
                known.turned = self._turned_if_memory(adapter)
        return known.turned or known.plain

    def _make_room(self, adapter: Adapter) -> bool:
        """Whether a copy of an adapter pays and has room, once copies long unused are gone."""
        needed = sum(self._turned_bytes(half) for pair in adapter.views.values() for half in pair)
        if needed > MOST_FILLING * adapter.params.nbytes:
            return False
        room = self._most_bytes - self.num_bytes - needed
        for known in sorted(self._known.values(), key=lambda known: known.last_use):
            if room < 0 and known.turned is not None and self._num_uses - known.last_use > RECENT_USES:
                room += known.turned.num_bytes
                known.turned = None
                known.num_uses = 0
        return room >= 0

    def _plain(self, adapter: Adapter) -> AdapterTable:
        table = AdapterTable((PairC * len(self._modules))())
        for entry, module in zip(table.pairs, self._modules, strict=True):
            pair = adapter.views.get(module)
            if pair is not None:
                entry.a, entry.b = (half.data_ptr() for half in pair)
        return table

    def _turned_if_memory(self, adapter: Adapter) -> AdapterTable | None:
        """A copy saves time alone: where there is no memory for it, the step goes on without."""
        try:
            return self._turned(adapter)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return None

    def _turned(self, adapter: Adapter) -> AdapterTable:
        pairs, copies = (PairC * len(self._modules))(), []
        for entry, module in zip(pairs, self._modules, strict=True):
            pair = adapter.views.get(module)
            if pair is not None:
                halves = [self._turn(half) for half in pair]
                copies += halves
                entry.a, entry.b = (half.data_ptr() for half in halves)
                entry.turned = 1
        return AdapterTable(pairs, copies)

    def _turned_bytes(self, matrix: Tensor) -> int:
        return self._core.packed_bytes(Stored.TURNED, *matrix.shape)

    def _turn(self, matrix: Tensor) -> Tensor:
        outputs, inputs = matrix.shape
        data = torch.empty(self._turned_bytes(matrix), dtype=torch.uint8)
        threads = torch.get_num_threads()
        self._core.pack(matrix.data_ptr(), outputs, inputs, Stored.TURNED, data.data_ptr(), threads)
        return data


_tables: WeakKeyDictionary[Transformer, dict[str, AdapterTables]] = WeakKeyDictionary()


def adapter_tables(model: Transformer, core: Core) -> AdapterTables:
    """The tables of the adapters on a model, which all its samplers share.

    Example:
        >>> adapter_tables(model, load_core()).num_bytes
        0
    """
    by_variant = _tables.setdefault(model, {})
    if core.variant not in by_variant:
        by_variant[core.variant] = AdapterTables(core, len(model.layers))
    return by_variant[core.variant]
