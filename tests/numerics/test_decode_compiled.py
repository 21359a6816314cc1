"""The compiled core against torch: the same hidden states, logits and samples, in every family and any batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import tiny_llama
from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.sampler.harness import full_logits, one_thread, random_tokens, trained_adapter
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.lora import Adapter
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.block_table import BlockTable
from tinkex.engine.sampler.compiled import CompiledCompute
from tinkex.engine.sampler.compute import TorchCompute
from tinkex.engine.sampler.kv_cache import PromptKV

__all__ = ["one_thread"]

pytestmark = pytest.mark.skipif(not CORES, reason="the package was installed without its compiled core")

TOLERANCE = 1e-4

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, untied, with biases": {
        "family": "llama",
        "tie": False,
        "config": {"attention_bias": True, "mlp_bias": True},
    },
    "llama, sizes that fill no panel": {
        "family": "llama",
        "vocab": 517,
        "hidden": 60,
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 10,
        "intermediate": 100,
    },
    "llama, one key head": {"family": "llama", "heads": 8, "kv_heads": 1, "head_dim": 40},
    "llama, long rows": {"family": "llama", "hidden": 336, "intermediate": 1000},
    "mistral, sliding": {"family": "mistral", "config": {"sliding_window": 24}},
    "qwen2, half of the layers sliding": {
        "family": "qwen2",
        "config": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    },
    "qwen3": {"family": "qwen3"},
    "qwen3, untied, with biases, groups of three": {
        "family": "qwen3",
        "tie": False,
        "heads": 6,
        "head_dim": 26,
        "config": {"attention_bias": True},
    },
    "mistral, sliding in one layer, in bf16": {
        "family": "mistral",
        "dtype": "bfloat16",
        "config": {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    },
    "llama3 rope": {
        "family": "llama",
        "config": {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    },
}


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    directory: Path = tmp_path_factory.mktemp("numerics") / "model"
    return load_transformer(tiny_llama(directory, seed=3, **FAMILIES[request.param]))


@pytest.fixture(params=CORES)
def compiled(request: pytest.FixtureRequest, model: Transformer) -> CompiledCompute:
    return CompiledCompute(model, CORES[request.param])


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((torch.log_softmax(one, -1) - torch.log_softmax(other, -1)).abs().max())


def prefilled(
    compute: CompiledCompute | TorchCompute,
    model: Transformer,
    prompt: Sequence[int],
    pieces: Sequence[int],
    adapter: Adapter | None = None,
) -> tuple[PromptKV, torch.Tensor]:
    """A prompt in memory, brought there in pieces, and the logits after each of its tokens."""
    kv = PromptKV(model.arch, model.dtype, len(prompt))
    logits = []
    for count in pieces:
        tokens = np.array(prompt[kv.filled : kv.filled + count], np.int32)
        hidden = compute.prefill(tokens, [(kv, count)], [(adapter, count)])
        logits.append(compute.logits(hidden, [(adapter, count)]))
        kv.filled += count
    assert kv.filled == len(prompt)
    return kv, torch.cat(logits)


@pytest.mark.slow
def test_prompts_and_steps_have_the_logprobs_of_a_plain_forward(
    model: Transformer, compiled: CompiledCompute
) -> None:
    """Uneven prompts and adapters of several ranks in one batch, over slots of several sizes."""
    adapters = [
        None,
        trained_adapter(model, 4, 1),
        trained_adapter(model, 40, 2),
        trained_adapter(model, 3, 3, train_mlp=False),
        trained_adapter(model, 6, 4, train_attn=False, train_unembed=False),
    ]
    prompts = [random_tokens(length, length) for length in (1, 30, 63, 64, 150)]
    futures = [random_tokens(12, 100 + index) for index in range(len(prompts))]
    wanted = [
        full_logits(model, prompt + future, adapter)
        for prompt, future, adapter in zip(prompts, futures, adapters, strict=True)
    ]
    table, slots = BlockTable(model.arch, model.dtype), []
    for prompt, adapter, expected in zip(prompts, adapters, wanted, strict=True):
        pieces = [len(prompt)] if len(prompt) < 64 else [50, len(prompt) - 50]
        kv, logits = prefilled(compiled, model, prompt, pieces, adapter)
        assert gap(logits, expected[: len(prompt)]) <= TOLERANCE
        slots.append(table.add(kv))
    segments = [(adapter, 1) for adapter in adapters]
    for step in range(12):
        for slot in slots:
            if table.is_full(slot):
                table.grow(slot)
        hidden = compiled.decode([future[step] for future in futures], table, slots, segments)
        logits = compiled.logits(hidden, segments)
        for row, slot in enumerate(slots):
            assert gap(logits[row], wanted[row][slot.length]) <= TOLERANCE
            slot.length += 1


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_any_batch(model: Transformer, compiled: CompiledCompute) -> None:
    """Alone or among others, on one thread or three, a row's numbers are the same to the last bit."""
    adapter = trained_adapter(model, 4, 1)
    prompts = [random_tokens(length, length) for length in (20, 64, 65, 130, *range(1, 60))]
    adapters = [adapter, None, adapter, *[None] * 30, *[adapter] * 30]
    order = sorted(range(len(prompts)), key=lambda index: id(adapters[index]))

    def states(members: Sequence[int], threads: int) -> dict[int, torch.Tensor]:
        torch.set_num_threads(threads)
        table = BlockTable(model.arch, model.dtype)
        segments = [(adapters[index], 1) for index in members]
        slots = []
        for index in members:
            kv, _ = prefilled(compiled, model, prompts[index], [len(prompts[index])], adapters[index])
            slots.append(table.add(kv))
            if table.is_full(slots[-1]):
                table.grow(slots[-1])
        hidden = compiled.decode([7] * len(members), table, slots, segments)
        logits = compiled.logits(hidden, segments)
        return dict(zip(members, logits, strict=True))

    everyone = states(order, 3)
    for index in range(4):
        assert torch.equal(states([index], 1)[index], everyone[index])


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [[1] * 150, [64, 64, 22], [33, 1, 90, 26], [149, 1]], ids=str)
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    model: Transformer, compiled: CompiledCompute, pieces: list[int]
) -> None:
    prompt = random_tokens(150, 1)
    whole_kv, whole = prefilled(compiled, model, prompt, [150])
    cut_kv, cut = prefilled(compiled, model, prompt, pieces)
    assert torch.equal(whole, cut)
    assert torch.equal(whole_kv.kv_L2KPd, cut_kv.kv_L2KPd)


@pytest.mark.slow
def test_a_step_has_the_bits_it_would_have_in_a_prompt(model: Transformer, compiled: CompiledCompute) -> None:
    """So a preempted sequence, whose output becomes part of its prompt, resumes as if nothing had happened."""
    adapter, tokens = trained_adapter(model, 4, 1), random_tokens(150, 1)
    _, whole = prefilled(compiled, model, tokens, [150], adapter)
    kv, _ = prefilled(compiled, model, tokens[:37], [37], adapter)
    table = BlockTable(model.arch, model.dtype)
    slot = table.add(kv)
    for place in range(37, 150):
        if table.is_full(slot):
            table.grow(slot)
        hidden = compiled.decode([tokens[place]], table, [slot], [(adapter, 1)])
        assert torch.equal(compiled.logits(hidden, [(adapter, 1)])[0], whole[place])
        slot.length += 1


def test_torch_gives_the_same_logprobs(model: Transformer, compiled: CompiledCompute) -> None:
    prompt = random_tokens(100, 1)
    plain = TorchCompute(model, "for this test")
    adapter = trained_adapter(model, 8, 5)
    _, ours = prefilled(compiled, model, prompt, [100], adapter)
    _, theirs = prefilled(plain, model, prompt, [60, 40], adapter)
    assert gap(ours, theirs) <= TOLERANCE
