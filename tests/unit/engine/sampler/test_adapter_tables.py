"""Adapters as the compiled core reads them: in torch's memory, or transposed, with the same bits."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.sampler.harness import random_tokens, trained_adapter
from tinkex.engine.kernels import Core
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler import adapter_tables
from tinkex.engine.sampler.adapter_tables import MAX_ROWS, AdapterTables
from tinkex.engine.sampler.compiled import CompiledCompute
from tinkex.engine.sampler.kv_cache import PromptKV

pytestmark = pytest.mark.skipif(not CORES, reason="the package was installed without its compiled core")


@pytest.fixture
def core() -> Core:
    return next(iter(CORES.values()))


def tables_of(model: Transformer, core: Core, **options: int) -> AdapterTables:
    return AdapterTables(core, len(model.layers), **options)


@pytest.mark.parametrize("variant", CORES)
@pytest.mark.parametrize("ranks", [(1, 32), (14, 16), (20, 33)], ids=str)
def test_transposed_copies_give_the_same_bits(
    model: Transformer, variant: str, ranks: tuple[int, int]
) -> None:
    core = CORES[variant]
    segments = [(trained_adapter(model, rank, rank), MAX_ROWS - n) for n, rank in enumerate(ranks)]
    num_rows = sum(rows for _, rows in segments)
    tokens = np.array(random_tokens(num_rows, 1), np.int32)
    found = []
    for tables in (tables_of(model, core, min_uses=0), tables_of(model, core, max_bytes=0)):
        compute = CompiledCompute(model, core, tables=tables)
        pieces = [(PromptKV(model.arch, model.dtype, rows), rows) for _, rows in segments]
        hidden = compute.prefill(tokens, pieces, segments)
        found.append((tables.num_bytes > 0, hidden, compute.logits(hidden, segments)))
    (transposed, *ours), (plain, *theirs) = found
    assert (transposed, plain) == (True, False)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_copy_is_made_after_some_uses_for_few_rows(model: Transformer, core: Core) -> None:
    tables, adapter = tables_of(model, core, min_uses=3), trained_adapter(model, 32, 1)
    for _ in range(10):
        assert not tables.get(adapter, MAX_ROWS + 1).copies
    for _ in range(3):
        assert not tables.get(adapter, MAX_ROWS).copies
    copy = tables.get(adapter, 1)
    assert copy.num_bytes == tables.num_bytes >= adapter.params.nbytes
    assert tables.get(adapter, 1) is copy
    assert not tables.get(adapter, MAX_ROWS + 1).copies


def test_copies_stay_within_their_memory(
    model: Transformer, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_tables, "RECENT_USES", 5)
    first, second = (trained_adapter(model, 32, seed) for seed in (1, 2))
    room = first.params.nbytes * 3 // 2
    tables = tables_of(model, core, min_uses=0, max_bytes=room)
    assert tables.get(first, 1).copies
    assert not tables.get(second, 1).copies, "the first is still in use"
    for _ in range(6):
        latest = tables.get(second, 1)
    assert latest.copies, "the first was not used for long"
    assert not tables.get(first, 1).copies
    assert tables.num_bytes <= room


def test_a_copy_that_would_hold_little_but_filling_is_not_made(model: Transformer, core: Core) -> None:
    tables = tables_of(model, core, min_uses=0)
    assert not tables.get(trained_adapter(model, 1, 1, train_unembed=False), 1).copies


def test_where_there_is_no_memory_for_a_copy_there_is_none(
    model: Transformer, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, adapter = tables_of(model, core, min_uses=0), trained_adapter(model, 32, 1)

    def pack(*_: int) -> bool:
        raise MemoryError

    monkeypatch.setattr(core, "pack", pack)
    assert not tables.get(adapter, 1).copies
    monkeypatch.undo()
    assert tables.get(adapter, 1).copies


def test_copies_go_with_their_adapters(model: Transformer, core: Core) -> None:
    tables, adapter = tables_of(model, core, min_uses=0), trained_adapter(model, 32, 1)
    assert tables.get(adapter, 1).copies
    del adapter
    gc.collect()
    assert tables.num_bytes == 0
