"""What the trainer computes equals ``transformers`` with PEFT in every family: logprobs, and the gradient of every pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import tiny_llama
from tests.numerics.test_logits import LLAMA3, YARN
from tests.unit.engine.trainer.harness import run_one, trained_state
from tinkex.engine.model.adapter_files import save_adapter
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.trainer.trainer import Trainer, TrainJob
from tinkex.types.inputs import Datum, ModelInput

# PEFT says that merging an adapter of a tied unembedding would change the embedding; here nothing is merged.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:peft")]

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, untied, with biases": {
        "family": "llama",
        "tie": False,
        "config": {"attention_bias": True, "mlp_bias": True},
    },
    "llama, groups of three, wide heads": {
        "family": "llama",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 26,
        "hidden": 60,
    },
    "llama3 rope": {"family": "llama", "config": {"rope_scaling": LLAMA3}},
    "mistral, sliding": {"family": "mistral", "config": {"sliding_window": 9}},
    "mistral, sliding in one layer": {
        "family": "mistral",
        "config": {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    },
    "qwen2, yarn": {"family": "qwen2", "config": {"rope_scaling": YARN | {"attention_factor": 1.4}}},
    "qwen2, sliding in one layer": {
        "family": "qwen2",
        "tie": False,
        "config": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    },
    "qwen3": {"family": "qwen3", "head_dim": 10},
    "qwen3, untied, with biases": {"family": "qwen3", "tie": False, "config": {"attention_bias": True}},
}
LENGTHS = (1, 5, 40, 40, 70)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_and_gradients_equal_those_of_peft(variant: str, tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model", vocab=131, **VARIANTS[variant])
    trainer = Trainer(load_transformer(directory), max_tokens_per_pass=100)
    state = trained_state(trainer, seed=3, rank=3)
    save_adapter(tmp_path / "adapter", state.adapter, str(directory))
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    reference = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).eval()

    generator = torch.Generator().manual_seed(1)
    data, expected = [], []
    loss = torch.zeros(())
    for length in LENGTHS:
        tokens = torch.randint(0, 131, (length + 1,), generator=generator)
        weights = torch.randn(length, generator=generator)
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        data.append(Datum(model_input=ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
        logits = reference(tokens[None, :-1], use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        expected.append(logprobs.detach())
        loss = loss - (weights * logprobs).sum()
    loss.backward()

    output = run_one(trainer, TrainJob(state, data, loss_fn="cross_entropy"))
    for found, logprobs in zip(output.loss_fn_outputs, expected, strict=True):
        torch.testing.assert_close(found["logprobs"].to_torch(), logprobs, rtol=0, atol=1e-4)
    assert state.grad is not None
    gradients = state.adapter.with_params(state.grad).views
    theirs = {
        name.removeprefix("base_model.model.").removeprefix("model."): parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.grad is not None
    }
    assert len(theirs) == 2 * len(gradients)
    for (module, layer), pair in gradients.items():
        block = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
        path = module if layer is None else f"layers.{layer}.{block}.{module}"
        for half, gradient in zip("AB", pair, strict=True):
            wanted = theirs[f"{path}.lora_{half}.default.weight"]
            torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
