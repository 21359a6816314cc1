"""Our logits equal those of ``transformers`` and PEFT on the same weights, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models import tiny_llama
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.lora import LoraRows
from tinkex.engine.model.transformer import Transformer

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama tied": ("llama", {}, {}),
    "llama untied": ("llama", {"tie": False}, {}),
    "llama with biases": ("llama", {}, {"attention_bias": True, "mlp_bias": True}),
    "llama with as many kv heads as heads": ("llama", {"kv_heads": 4}, {}),
    "llama of odd sizes": ("llama", {"hidden": 48, "heads": 6, "kv_heads": 1, "intermediate": 100}, {}),
    "llama with llama3 rope": ("llama", {}, {"rope_scaling": LLAMA3}),
    "llama with linear rope": ("llama", {}, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama with dynamic rope": ("llama", {}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama with transformers 5 rope parameters": (
        "llama",
        {},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
    ),
    "llama with heads wider than its hidden size": ("llama", {"head_dim": 24}, {}),
    "llama with one key/value head and long wavelengths": (
        "llama",
        {"kv_heads": 1},
        {"rope_theta": 5_000_000.0, "rms_norm_eps": 1e-6},
    ),
    "mistral": ("mistral", {"tie": False}, {}),
    "mistral with narrow heads": ("mistral", {"head_dim": 8, "kv_heads": 4}, {}),
    "mistral with a sliding window": ("mistral", {"tie": False}, {"sliding_window": 7}),
    "mistral sliding by layer types": (
        "mistral",
        {},
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2": ("qwen2", {}, {}),
    "qwen2 with yarn rope": ("qwen2", {}, {"rope_scaling": YARN}),
    "qwen2 with untruncated yarn rope": (
        "qwen2",
        {},
        {"rope_scaling": YARN | {"truncate": False, "beta_fast": 8}},
    ),
    "qwen2 with yarn and an attention factor": (
        "qwen2",
        {},
        {"rope_scaling": YARN | {"attention_factor": 1.5}},
    ),
    "qwen2 sliding in later layers": (
        "qwen2",
        {"layers": 3},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen3 untied with biases": ("qwen3", {"tie": False}, {"attention_bias": True}),
    "qwen3 sliding by layer types": (
        "qwen3",
        {},
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def _tokens(*lengths: int, vocab: int = 512, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def _packed_logits(model: Transformer, sequences: list[Tensor], lora: LoraRows | None = None) -> list[Tensor]:
    lengths = [len(tokens) for tokens in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = model.hidden(torch.cat(sequences), positions, packed_causal(lengths, model.arch), lora)
    return list(model.logits(hidden, lora).split(lengths))


def _reference(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, shape, config = VARIANTS[variant]
    directory = tiny_llama(tmp_path / "model", family=family, config=config, **shape)
    model, reference = load_transformer(directory), _reference(directory)
    sequences = _tokens(40, 3, 17, 17, 1)
    with torch.no_grad():
        ours = _packed_logits(model, sequences)
        theirs = [reference(tokens[None]).logits[0] for tokens in sequences]
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCE)


SCALED = {
    "plain": ("llama", {}),
    "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "yarn": ("qwen2", {"rope_scaling": YARN}),
    "yarn with mscale": ("qwen3", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama3 on mistral with a window": ("mistral", {"rope_scaling": LLAMA3, "sliding_window": 100}),
    "yarn on qwen3": ("qwen3", {"rope_scaling": YARN | {"beta_slow": 2.0}}),
}


@pytest.mark.parametrize("kind", SCALED)
def test_logits_hold_up_to_the_end_of_the_context_far_beyond_the_original_one(
    kind: str, tmp_path: Path
) -> None:
    family, config = SCALED[kind]
    directory = tiny_llama(tmp_path / "model", family=family, config=config, context=512, tie=False)
    model, reference = load_transformer(directory), _reference(directory)
    sequences = _tokens(512, 129)
    with torch.no_grad():
        ours = _packed_logits(model, sequences)
        theirs = [reference(tokens[None]).logits[0] for tokens in sequences]
    assert model.arch.max_context == 512
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_half_precision_in_shards_is_computed_in_fp32(tmp_path: Path, family: str, dtype: str) -> None:
    directory = tiny_llama(tmp_path / "model", family=family, dtype=dtype, num_shards=3, tie=False)
    model, reference = load_transformer(directory), _reference(directory)
    [tokens] = _tokens(30)
    with torch.no_grad():
        torch.testing.assert_close(
            _packed_logits(model, [tokens])[0], reference(tokens[None]).logits[0], rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("window", [None, 4])
def test_packed_sequences_do_not_see_each_other(tmp_path: Path, window: int | None) -> None:
    directory = tiny_llama(tmp_path / "model", family="mistral", config={"sliding_window": window})
    model = load_transformer(directory)
    sequences = _tokens(9, 9, 2, 30, 9)
    with torch.no_grad():
        together = _packed_logits(model, sequences)
        alone = [_packed_logits(model, [tokens])[0] for tokens in sequences]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
