"""A merged model in ``transformers`` has the logits that the base model with its adapter has here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import tiny_llama
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.export import export_model
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.lora import Adapter, LoraRows, LoraSpec
from tinkex.engine.model.transformer import Transformer

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
TOKENS = torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(5))


def trained(model: Transformer, spec: LoraSpec) -> Adapter:
    adapter = Adapter.create(model.arch, spec)
    noise = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(3))
    return adapter.with_params(adapter.params + 0.05 * noise)


def our_logits(model: Transformer, adapter: Adapter | None = None) -> Tensor:
    lora = LoraRows([(adapter, len(TOKENS))])
    attend = packed_causal([len(TOKENS)], model.arch)
    with torch.no_grad():
        return model.logits(model.hidden(TOKENS, torch.arange(len(TOKENS)), attend, lora), lora)


def their_logits(directory: Path) -> Tensor:
    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = reference(TOKENS[None]).logits[0]
        return logits


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("unembed", [True, False], ids=["with unembedding", "without"])
def test_a_merged_model_has_the_logits_of_its_adapter(
    tmp_path: Path, family: str, tie: bool, unembed: bool
) -> None:
    base = tiny_llama(tmp_path / "base", family=family, tie=tie)
    model = load_transformer(base)
    adapter = trained(model, LoraSpec(rank=4, seed=0, train_unembed=unembed))
    merged = export_model(base, tmp_path / "merged", adapter)
    expected = our_logits(model, adapter)
    torch.testing.assert_close(their_logits(merged), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(our_logits(load_transformer(merged)), expected, rtol=0, atol=TOLERANCE)
    assert (expected - our_logits(model)).abs().max() > 100 * TOLERANCE


def test_an_adapter_of_a_tied_unembedding_unties_it_and_leaves_the_embedding_alone(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", tie=True)
    model = load_transformer(base)
    adapter = trained(model, LoraSpec(rank=4, seed=0, train_attn=False, train_mlp=False))
    merged = load_transformer(export_model(base, tmp_path / "merged", adapter))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(merged.embedding_VD, model.embedding_VD)
    assert not torch.equal(merged.unembedding_VD, model.embedding_VD)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_the_merged_weights_once(tmp_path: Path, dtype: Any) -> None:
    base = tiny_llama(tmp_path / "base", dtype=dtype)
    model = load_transformer(base)
    adapter = trained(model, LoraSpec(rank=4, seed=0))
    exact = load_transformer(export_model(base, tmp_path / "exact", adapter))
    rounded = load_transformer(export_model(base, tmp_path / "rounded", adapter, dtype=dtype))
    for one, other in zip(exact.layers, rounded.layers, strict=True):
        assert torch.equal(one.gate_up_2FD.to(getattr(torch, dtype)).float(), other.gate_up_2FD)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded", dtype="auto")
    assert again.dtype == getattr(torch, dtype)
    torch.testing.assert_close(
        their_logits(tmp_path / "rounded"), our_logits(rounded), rtol=0, atol=TOLERANCE
    )


def test_shards_and_biases_and_the_tokenizer_come_along(tmp_path: Path) -> None:
    base = tiny_llama(
        tmp_path / "base", num_shards=3, config={"attention_bias": True, "mlp_bias": True}, tie=False
    )
    model = load_transformer(base)
    adapter = trained(model, LoraSpec(rank=2, seed=0))
    merged = export_model(base, tmp_path / "merged", adapter, max_shard_bytes=100_000)
    shards = sorted(merged.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    assert not (merged / "model.safetensors").exists()
    torch.testing.assert_close(their_logits(merged), our_logits(model, adapter), rtol=0, atol=TOLERANCE)
    assert AutoTokenizer.from_pretrained(merged)("two plus two").input_ids == (
        AutoTokenizer.from_pretrained(base)("two plus two").input_ids
    )
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (merged / name).read_bytes() == (base / name).read_bytes()


def test_a_model_without_an_adapter_is_exported_bit_for_bit(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    merged = export_model(base, tmp_path / "copy")
    assert torch.equal(our_logits(load_transformer(merged)), our_logits(load_transformer(base)))
