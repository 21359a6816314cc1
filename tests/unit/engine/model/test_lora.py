from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.loader import read_architecture
from tinkex.engine.model.lora import Adapter, LoraLayout, LoraRows, LoraSpec
from tinkex.errors import InvalidInput


@pytest.fixture
def arch(tiny_model: Path) -> Architecture:
    return read_architecture(tiny_model)


def test_the_layout_covers_the_buffer_without_gaps(arch: Architecture) -> None:
    layout = LoraLayout.of(arch, LoraSpec(rank=3))
    offset = 0
    for slot in layout.slots:
        assert slot.a_offset == offset
        assert slot.b_offset == offset + 3 * slot.in_features
        offset = slot.b_offset + 3 * slot.out_features
    assert offset == layout.num_params == sum(layout.split_sizes)


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_train_flags_choose_the_modules(
    arch: Architecture, flags: dict[str, bool], modules: set[str]
) -> None:
    assert {slot.module for slot in LoraLayout.of(arch, LoraSpec(rank=2, **flags)).slots} == modules


def test_a_fresh_adapter_changes_nothing_and_repeats_with_its_seed(arch: Architecture) -> None:
    first, again = (Adapter.create(arch, LoraSpec(rank=4, seed=11)) for _ in range(2))
    assert torch.equal(first.params, again.params)
    assert not torch.equal(first.params, Adapter.create(arch, LoraSpec(rank=4, seed=12)).params)
    for a, b in first.views.values():
        assert b.count_nonzero() == 0
        bound = a.shape[1] ** -0.5
        assert a.abs().max() <= bound
        assert a.std() == pytest.approx(bound / 3**0.5, rel=0.2)


def test_every_bit_of_a_seed_counts(arch: Architecture) -> None:
    seeds = [5, 5 + 2**32, 5 + 2**63, -5, -5 + 2**64, 2**64 - 1, -1, 2**63 - 1]
    params = [Adapter.create(arch, LoraSpec(rank=1, seed=seed)).params for seed in seeds]
    assert len({tuple(each[:8].tolist()) for each in params}) == len(seeds)


def test_a_drawn_seed_is_recorded(arch: Architecture) -> None:
    adapter = Adapter.create(arch, LoraSpec(rank=2))
    assert adapter.spec.seed is not None
    assert torch.equal(Adapter.create(arch, adapter.spec).params, adapter.params)


def test_views_share_memory_with_the_flat_buffer(arch: Architecture) -> None:
    adapter = Adapter.create(arch, LoraSpec(rank=2, seed=0))
    slot = adapter.layout.slots[3]
    adapter.params[slot.b_offset] = 42.0
    assert adapter.views[slot.module, slot.layer][1][0, 0] == 42.0


def test_another_buffer_must_fit_the_layout(arch: Architecture) -> None:
    adapter = Adapter.create(arch, LoraSpec(rank=2, seed=0))
    assert adapter.with_params(torch.zeros_like(adapter.params)).params.sum() == 0
    with pytest.raises(ValueError, match="parameters"):
        adapter.with_params(torch.zeros(3))


def test_rows_without_an_adapter_stay_as_they_are(arch: Architecture) -> None:
    adapter = Adapter.create(arch, LoraSpec(rank=2, seed=0))
    adapter = adapter.with_params(torch.ones_like(adapter.params))
    x, y = torch.ones(5, 64), torch.zeros(5, 64)
    out = LoraRows([(None, 2), (adapter, 3)]).apply("q_proj", 0, x, y)
    assert torch.equal(out[:2], y[:2])
    assert torch.equal(out[2:], torch.full((3, 64), 16.0 * 64 * 2))  # alpha / rank · Σ x · rank


@pytest.mark.parametrize(
    "settings", [{"rank": 0}, {"rank": 4, "train_mlp": False, "train_attn": False, "train_unembed": False}]
)
def test_a_spec_that_trains_nothing_is_rejected(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidInput):
        LoraSpec(**settings)  # type: ignore[arg-type]
