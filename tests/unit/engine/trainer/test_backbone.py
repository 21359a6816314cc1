"""The training path computes what the model computes, for every family and any mix of tenants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.engine.trainer.harness import sequence, sft_datum, small_transformer, trained_state
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.lora import LoraRows
from tinkex.engine.trainer.backbone import Backbone, Tenant
from tinkex.engine.trainer.batch import PackedBatch, pack_batches
from tinkex.engine.trainer.examples import Limits, read_examples
from tinkex.engine.trainer.lora_kernels import LoraKernel, TorchLoraKernel
from tinkex.engine.trainer.losses import LOSSES
from tinkex.engine.trainer.trainer import Trainer


def packed_of(*jobs: list[int]) -> PackedBatch:
    random = np.random.default_rng(0)
    limits = Limits(vocab_size=96, max_context=64)
    data = [[sft_datum(sequence(random, length)) for length in lengths] for lengths in jobs]
    examples = [read_examples(datums, LOSSES["cross_entropy"], {}, limits) for datums in data]
    [packed] = pack_batches([{job: own} for job, own in enumerate(examples)], 1000)
    return packed


KERNELS = pytest.mark.parametrize("kernel", [None, TorchLoraKernel()], ids=["chosen", "torch"])


@pytest.mark.slow
@KERNELS
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_hidden_states_are_those_of_the_model(
    family: str, config: dict[str, object], kernel: LoraKernel | None, tmp_path: Path
) -> None:
    model = small_transformer(tmp_path, family=family, config=config)
    trainer = Trainer(model)
    states = [trained_state(trainer, seed=1, rank=2), trained_state(trainer, seed=2, train_mlp=False)]
    packed = packed_of([5, 9, 5], [7])
    tokens_T, positions_T = torch.from_numpy(packed.tokens_T), torch.from_numpy(packed.positions_T)
    rows = LoraRows([(state.adapter, s.num_rows) for state, s in zip(states, packed.segments, strict=True)])
    with torch.no_grad():
        expected_TD = model.hidden(
            tokens_T, positions_T, packed_causal([node.length for node in packed.nodes], model.arch), rows
        )
        hidden_TD = Backbone(model, kernel).hidden(packed, [Tenant(state.adapter) for state in states])
    torch.testing.assert_close(hidden_TD, expected_TD, rtol=1e-5, atol=1e-5)


def test_both_lora_kernels_give_the_same_gradients(tmp_path: Path) -> None:
    model = small_transformer(tmp_path)
    trainer = Trainer(model)
    states = [trained_state(trainer, seed=1, rank=2), trained_state(trainer, seed=2, train_attn=False)]
    packed = packed_of([5, 9], [20, 7])
    found = []
    for kernel in (None, TorchLoraKernel()):
        gradients = [torch.zeros_like(state.adapter.params) for state in states]
        tenants = [Tenant(state.adapter, own) for state, own in zip(states, gradients, strict=True)]
        hidden_TD = Backbone(model, kernel).hidden(packed, tenants)
        torch.autograd.backward(hidden_TD, torch.ones_like(hidden_TD))
        found.append(gradients)
    assert all(bool(gradient.any()) for gradient in found[0])
    # Relative to the whole gradient: single elements are small differences of large sums.
    for compiled, plain in zip(*found, strict=True):
        assert float((compiled - plain).norm() / plain.norm()) < 2e-6


@pytest.mark.slow
@KERNELS
def test_recomputed_layers_give_the_same_gradient(kernel: LoraKernel | None, tmp_path: Path) -> None:
    model = small_transformer(tmp_path)
    state = trained_state(Trainer(model))
    packed = packed_of([5, 9])
    gradients = []
    for recompute in (False, True):
        gradient = torch.zeros_like(state.adapter.params)
        tenants = [Tenant(state.adapter, gradient)]
        hidden_TD = Backbone(model, kernel).hidden(packed, tenants, recompute=recompute)
        torch.autograd.backward(hidden_TD, torch.ones_like(hidden_TD))
        gradients.append(gradient)
    assert bool(gradients[0].any())
    torch.testing.assert_close(gradients[0], gradients[1])
