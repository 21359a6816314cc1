"""The code for vectors of 16 lanes, emulated where the processor has none of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models import tiny_llama
from tests.unit.engine.sampler.harness import full_logits, random_tokens, trained_adapter
from tests.unit.engine.trainer.lora_runs import Shape, run
from tinkex.engine.kernels import load_core
from tinkex.engine.kernels.build import build_core
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.threads import torch_team
from tinkex.engine.sampler.adapter_tables import AdapterTables
from tinkex.engine.sampler.block_table import BlockTable
from tinkex.engine.sampler.compiled import CompiledCompute
from tinkex.engine.sampler.kv_cache import PromptKV
from tinkex.engine.sampler.logits import RowSettings, draw
from tinkex.engine.trainer.lora_kernels import CompiledLoraKernel, TorchLoraKernel

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler here")
def test_sixteen_lanes_give_the_same_numbers(tmp_path: Path) -> None:
    library = build_core(tmp_path / "core.so", extra_flags=("-O1", "-DTINKEX_WIDE", "-Wno-psabi"))
    model = load_transformer(
        tiny_llama(tmp_path / "model", hidden=112, heads=6, kv_heads=2, head_dim=40, intermediate=200)
    )
    compute = CompiledCompute(model, load_core(library))
    adapter = trained_adapter(model, 5, 1)
    prompt = random_tokens(100, 1)
    kv = PromptKV(model.arch, model.dtype, 100)
    hidden = compute.prefill(np.array(prompt, np.int32), [(kv, 100)], [(adapter, 100)])
    expected = full_logits(model, [*prompt, 7], adapter)
    logits = compute.logits(hidden, [(adapter, 100)])
    torch.testing.assert_close(logits, expected[:-1], atol=1e-4, rtol=0)
    kv.filled = 100
    table = BlockTable(model.arch, model.dtype)
    slots = [table.add(kv) for _ in range(17)]
    after = compute.decode([7] * 17, table, slots, [(adapter, 17)])
    last = compute.logits(after, [(adapter, 17)])
    torch.testing.assert_close(last, expected[-1:].repeat(17, 1), atol=1e-4, rtol=0)
    segments = [(trained_adapter(model, 64, 2), 3)]
    tables = AdapterTables(load_core(library), len(model.layers), min_uses=0)
    transposed = CompiledCompute(model, load_core(library), tables=tables).logits(after[:3], segments)
    assert tables.num_bytes > 0
    assert torch.equal(transposed, compute.logits(after[:3], segments))
    settings = [RowSettings(top_p=0.9), RowSettings(top_k=7), RowSettings(), RowSettings(temperature=0)]
    uniforms = np.random.default_rng(1).random(100).tolist()
    ours, theirs = (way(logits, settings * 25, uniforms) for way in (compute.draw, draw))
    assert ours.tokens_B.tolist() == theirs.tokens_B.tolist()
    if (team := torch_team()) is not None:
        shape = Shape(100, [130, 7], [(90, 17), (40, 32)], [True, True])
        found, exact = (
            run(math, shape) for math in (CompiledLoraKernel(load_core(library), team), TorchLoraKernel())
        )
        torch.testing.assert_close(found.tensors, exact.tensors, rtol=1e-4, atol=1e-2)
