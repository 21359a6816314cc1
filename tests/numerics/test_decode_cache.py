"""The cached, chunked, batched way to logits against one plain forward over the whole text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import tiny_llama
from tests.unit.engine.sampler.harness import full_logits, one_thread, random_tokens, trained_adapter
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.lora import LoraRows
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.kv_cache import PromptKV, SlotTable, prefill_attend

pytestmark = pytest.mark.slow

__all__ = ["one_thread"]

TOLERANCE = 1e-4

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, as many key heads as heads": {"family": "llama", "kv_heads": 4},
    "mistral, sliding": {"family": "mistral", "config": {"sliding_window": 24}},
    "qwen2, half of the layers sliding": {
        "family": "qwen2",
        "config": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    },
    "qwen3": {"family": "qwen3"},
}


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    directory: Path = tmp_path_factory.mktemp("numerics") / "model"
    return load_transformer(tiny_llama(directory, seed=3, **FAMILIES[request.param]))


def prefill(
    model: Transformer, prompts: list[list[int]], chunks: list[list[int]]
) -> tuple[list[PromptKV], list[torch.Tensor]]:
    """Prefills the prompts together, ``chunks[i]`` tokens of each at a time; their caches and all their logits."""
    caches = [PromptKV(model.arch, model.dtype, len(prompt)) for prompt in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(max(map(len, chunks))):
        pieces = [(index, sizes[step]) for index, sizes in enumerate(chunks) if step < len(sizes)]
        starts = [caches[index].filled for index, _ in pieces]
        tokens = [
            prompts[index][start : start + size] for (index, size), start in zip(pieces, starts, strict=True)
        ]
        positions = [range(start, start + size) for (_, size), start in zip(pieces, starts, strict=True)]
        hidden = model.hidden(
            torch.tensor([token for piece in tokens for token in piece]),
            torch.tensor([position for span in positions for position in span]),
            prefill_attend([(caches[index], size) for index, size in pieces], model.arch),
        )
        for (index, size), rows in zip(pieces, hidden.split([size for _, size in pieces]), strict=True):
            logits[index].append(model.logits(rows))
            caches[index].filled += size
    return caches, [torch.cat(parts) for parts in logits]


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("chunks", [[100], [1] * 100, [64, 36], [33, 1, 40, 26], [10] * 10], ids=str)
def test_chunked_prefill_equals_the_full_forward(model: Transformer, chunks: list[int]) -> None:
    prompt = random_tokens(100, 1)
    _, [logits] = prefill(model, [prompt], [chunks])
    assert gap(logits, full_logits(model, prompt)) <= TOLERANCE


def test_prompts_prefilled_together_equal_each_alone(model: Transformer) -> None:
    prompts = [random_tokens(length, length) for length in (1, 17, 64, 90)]
    _, logits = prefill(model, prompts, [[1], [5, 12], [64], [30, 30, 30]])
    for prompt, got in zip(prompts, logits, strict=True):
        assert gap(got, full_logits(model, prompt)) <= TOLERANCE


def test_cached_decode_equals_the_full_forward(model: Transformer) -> None:
    """Sequences of uneven lengths, over several capacities, in one batch: every step's logits."""
    prompts = [random_tokens(length, length) for length in (1, 30, 63, 64, 120)]
    futures = [random_tokens(40, 100 + index) for index in range(len(prompts))]
    caches, _ = prefill(model, prompts, [[len(prompt)] for prompt in prompts])
    expected = [full_logits(model, prompt + future) for prompt, future in zip(prompts, futures, strict=True)]
    table = SlotTable(model.arch, model.dtype)
    slots = [table.add(cache) for cache in caches]
    for step in range(40):
        for slot in slots:
            if table.is_full(slot):
                table.grow(slot)
        hidden = model.hidden(
            torch.tensor([future[step] for future in futures]),
            torch.tensor([slot.length for slot in slots]),
            table.attend(slots),
        )
        logits = model.logits(hidden)
        for row, slot in enumerate(slots):
            assert gap(logits[row], expected[row][slot.length]) <= TOLERANCE
            slot.length += 1


def test_sequences_that_join_and_leave_do_not_disturb_the_others(model: Transformer) -> None:
    prompts = [random_tokens(20 + 5 * index, index) for index in range(6)]
    caches, _ = prefill(model, prompts, [[len(prompt)] for prompt in prompts])
    table = SlotTable(model.arch, model.dtype)
    running = {index: table.add(caches[index]) for index in (0, 1, 2)}
    said = {index: random_tokens(12, 50 + index) for index in range(6)}
    expected = {index: full_logits(model, prompts[index] + said[index]) for index in range(6)}
    for step in range(10):
        if step in {2, 4, 6}:
            leaver, joiner = {2: (0, 3), 4: (3, 4), 6: (1, 5)}[step]
            table.remove(running.pop(leaver))
            running[joiner] = table.add(caches[joiner])
        slots = list(running.values())
        done = [slot.length - len(prompts[index]) for index, slot in running.items()]
        hidden = model.hidden(
            torch.tensor([said[index][count] for index, count in zip(running, done, strict=True)]),
            torch.tensor([slot.length for slot in slots]),
            table.attend(slots),
        )
        for row, (index, slot) in enumerate(running.items()):
            assert gap(model.logits(hidden[row : row + 1])[0], expected[index][slot.length]) <= TOLERANCE
            slot.length += 1


def test_several_adapters_in_one_decode_batch_equal_each_alone(model: Transformer) -> None:
    adapters = [
        trained_adapter(model, 4, 1),
        None,
        trained_adapter(model, 8, 2),
        trained_adapter(model, 2, 3, train_mlp=False),
    ]
    prompts = [random_tokens(20 + index, index) for index in range(4)]
    said = random_tokens(1, 9)[0]
    table = SlotTable(model.arch, model.dtype)
    slots = []
    for prompt, adapter in zip(prompts, adapters, strict=True):
        cache = PromptKV(model.arch, model.dtype, len(prompt))
        model.hidden(
            torch.tensor(prompt),
            torch.arange(len(prompt)),
            prefill_attend([(cache, len(prompt))], model.arch),
            LoraRows([(adapter, len(prompt))]),
        )
        slots.append(table.add(cache))
    rows = LoraRows([(adapter, 1) for adapter in adapters])
    positions = torch.tensor([len(prompt) for prompt in prompts])
    logits = model.logits(model.hidden(torch.tensor([said] * 4), positions, table.attend(slots), rows), rows)
    for row, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        expected = full_logits(model, [*prompt, said], adapter)[-1]
        assert gap(logits[row], expected) <= TOLERANCE
        base = full_logits(model, [*prompt, said])[-1]
        assert adapter is None or gap(expected, base) > 100 * TOLERANCE  # the adapters do change something


def test_a_prompt_may_be_filled_from_another_that_begins_the_same(model: Transformer) -> None:
    head, tail = random_tokens(50, 1), random_tokens(30, 2)
    [source], _ = prefill(model, [[*head, 7, 8]], [[52]])
    cache = PromptKV(model.arch, model.dtype, 80)
    cache.copy_prefix(source, 50)
    hidden = model.hidden(torch.tensor(tail), torch.arange(50, 80), prefill_attend([(cache, 30)], model.arch))
    assert gap(model.logits(hidden), full_logits(model, head + tail)[50:]) <= TOLERANCE
    assert np.isfinite(cache.kv_L2KPd.numpy()).all()
