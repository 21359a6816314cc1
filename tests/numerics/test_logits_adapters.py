"""Logits with LoRA adapters equal those of PEFT, for adapters written by either side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models import tiny_llama
from tinkex.checkpoints.peft_names import name_head_for_peft
from tinkex.engine.model.adapter_files import TINKER_UNEMBED_PATH, load_adapter, save_adapter
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.lora import Adapter, LoraRows, LoraSpec
from tinkex.engine.model.transformer import Transformer
from tinkex.errors import InvalidInput

TOLERANCE = 1e-4
# PEFT says that merging an adapter of a tied unembedding would change the embedding; here nothing is merged.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:peft")]


def _trained(arch: Any, spec: LoraSpec, seed: int = 3) -> Adapter:
    """An adapter whose B is not zero."""
    adapter = Adapter.create(arch, spec)
    noise = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(seed))
    return adapter.with_params(adapter.params + 0.05 * noise)


def _logits(model: Transformer, tokens: Tensor, adapter: Adapter | None) -> Tensor:
    lora = LoraRows([(adapter, len(tokens))])
    attend = packed_causal([len(tokens)], model.arch)
    return model.logits(model.hidden(tokens, torch.arange(len(tokens)), attend, lora), lora)


def _base(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


TOKENS = torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("family", "tie", "spec"),
    [
        ("llama", True, LoraSpec(rank=4, seed=0)),
        ("llama", False, LoraSpec(rank=5, seed=0, alpha=7.5)),
        ("qwen2", True, LoraSpec(rank=3, seed=0, train_unembed=False)),
        ("qwen3", False, LoraSpec(rank=2, seed=0, train_attn=False)),
        ("mistral", False, LoraSpec(rank=8, seed=0, train_mlp=False)),
    ],
)
def test_an_adapter_we_save_has_the_same_logits_in_peft(
    tmp_path: Path, family: str, tie: bool, spec: LoraSpec
) -> None:
    directory = tiny_llama(tmp_path / "model", family=family, tie=tie)
    model = load_transformer(directory)
    adapter = _trained(model.arch, spec)
    save_adapter(tmp_path / "adapter", adapter, str(directory))
    reference = peft.PeftModel.from_pretrained(_base(directory), tmp_path / "adapter").eval()
    with torch.no_grad():
        ours = _logits(model, TOKENS, adapter)
        theirs = reference(TOKENS[None]).logits[0]
        untouched = _logits(model, TOKENS, None)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert (ours - untouched).abs().max() > 100 * TOLERANCE
    restored = load_adapter(tmp_path / "adapter", model.arch)
    assert torch.equal(restored.params, adapter.params)
    assert restored.spec.scale == spec.scale


@pytest.mark.parametrize("tie", [True, False])
def test_an_adapter_for_samplers_has_the_same_logits_in_peft_once_its_head_is_named_for_it(
    tmp_path: Path, tie: bool
) -> None:
    directory = tiny_llama(tmp_path / "model", tie=tie)
    model = load_transformer(directory)
    adapter = _trained(model.arch, LoraSpec(rank=4, seed=0))
    save_adapter(tmp_path / "adapter", adapter, str(directory), unembed_path=TINKER_UNEMBED_PATH)
    name_head_for_peft(tmp_path / "adapter")
    reference = peft.PeftModel.from_pretrained(_base(directory), tmp_path / "adapter").eval()
    with torch.no_grad():
        theirs = reference(TOKENS[None]).logits[0]
    torch.testing.assert_close(_logits(model, TOKENS, adapter), theirs, rtol=0, atol=TOLERANCE)


MADE_BY_PEFT: dict[str, dict[str, Any]] = {
    "some modules": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "one layer": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj"],
        "layers_to_transform": [1],
    },
    "a regular expression": {"r": 3, "lora_alpha": 5, "target_modules": r".*layers\.0\..*(k|down)_proj"},
    "all linear modules": {"r": 9, "lora_alpha": 16, "target_modules": "all-linear", "lora_dropout": 0.1},
    "the unembedding": {"r": 4, "lora_alpha": 16, "target_modules": ["down_proj", "lm_head"]},
    "the scale of rank-stabilised LoRA": {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["down_proj", "o_proj"],
        "use_rslora": True,
    },
    "ranks and alphas by pattern": {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 7, r"layers\.1\..*down_proj": 2, "^model.layers.0.mlp.up_proj": 1},
        "alpha_pattern": {"v_proj": 3, r"model\.layers\.\d+\.mlp\.gate_proj": 40, "q_proj": 21},
    },
    "patterns with rank-stabilised LoRA": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"k_proj": 9},
        "use_rslora": True,
    },
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", MADE_BY_PEFT)
def test_an_adapter_made_by_peft_has_the_same_logits_here(tmp_path: Path, kind: str, family: str) -> None:
    directory = tiny_llama(tmp_path / "model", family=family, tie=False)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **MADE_BY_PEFT[kind])
    reference = peft.get_peft_model(_base(directory), config).eval()
    reference.save_pretrained(tmp_path / "adapter")
    model = load_transformer(directory)
    adapter = load_adapter(tmp_path / "adapter", model.arch)
    with torch.no_grad():
        theirs = reference(TOKENS[None]).logits[0]
        ours = _logits(model, TOKENS, adapter)
        untouched = _logits(model, TOKENS, None)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert (ours - untouched).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("embeddings", ["auto", True, False])
def test_an_adapter_of_a_tied_unembedding_made_by_peft_has_the_same_logits_here(
    tmp_path: Path, embeddings: Any
) -> None:
    """Whether or not PEFT stores the embedding beside it."""
    directory = tiny_llama(tmp_path / "model", tie=True)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", init_lora_weights=False, r=4, target_modules=["q_proj", "lm_head"]
    )
    reference = peft.get_peft_model(_base(directory), config).eval()
    reference.save_pretrained(tmp_path / "adapter", save_embedding_layers=embeddings)
    model = load_transformer(directory)
    with torch.no_grad():
        theirs = reference(TOKENS[None]).logits[0]
        ours = _logits(model, TOKENS, load_adapter(tmp_path / "adapter", model.arch))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_stored_in_half_precision_is_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = tiny_llama(tmp_path / "model")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", init_lora_weights=False, r=4, lora_alpha=8, target_modules="all-linear"
    )
    reference = peft.get_peft_model(_base(directory), config).eval()
    reference.to(dtype).save_pretrained(tmp_path / "adapter")
    reference = peft.PeftModel.from_pretrained(_base(directory), tmp_path / "adapter").float().eval()
    model = load_transformer(directory)
    with torch.no_grad():
        theirs = reference(TOKENS[None]).logits[0]
        ours = _logits(model, TOKENS, load_adapter(tmp_path / "adapter", model.arch))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["q_proj"], "bias": "lora_only"}, "lora_only"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "input embeddings"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias"),
    ],
)
def test_an_adapter_of_peft_that_is_not_plain_lora_is_rejected_and_named(
    tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    directory = tiny_llama(tmp_path / "model", tie=False, layers=1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, r=2, **settings)
    peft.get_peft_model(_base(directory), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(InvalidInput, match=name):
        load_adapter(tmp_path / "adapter", load_transformer(directory).arch)


def test_gradients_of_the_adapter_equal_those_of_peft(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model", tie=False)
    model = load_transformer(directory)
    adapter = _trained(model.arch, LoraSpec(rank=4, seed=0))
    save_adapter(tmp_path / "adapter", adapter, str(directory))
    reference = peft.PeftModel.from_pretrained(_base(directory), tmp_path / "adapter", is_trainable=True)
    targets = TOKENS.roll(-1)

    leaf = adapter.params.clone().requires_grad_()
    torch.nn.functional.cross_entropy(
        _logits(model, TOKENS, adapter.with_params(leaf)), targets, reduction="sum"
    ).backward()
    torch.nn.functional.cross_entropy(reference(TOKENS[None]).logits[0], targets, reduction="sum").backward()

    assert leaf.grad is not None
    gradients = adapter.with_params(leaf.grad).views
    compared = 0
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            continue
        half = 0 if "lora_A" in name else 1
        parts = name.split(".")
        layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else None
        module = next(part for part in parts if part.endswith("_proj") or part == "lm_head")
        torch.testing.assert_close(gradients[module, layer][half], parameter.grad, rtol=1e-4, atol=1e-4)
        compared += 1
    assert compared == 2 * len(adapter.layout.slots)


def test_rows_of_several_adapters_of_different_rank_share_one_batch(tmp_path: Path) -> None:
    model = load_transformer(tiny_llama(tmp_path / "model"))
    adapters = [
        _trained(model.arch, LoraSpec(rank=4, seed=0)),
        None,
        _trained(model.arch, LoraSpec(rank=7, seed=1, train_mlp=False, train_unembed=False)),
    ]
    sequences = [TOKENS[:9], TOKENS[3:8], TOKENS[:9]]
    lengths = [len(tokens) for tokens in sequences]
    lora = LoraRows(list(zip(adapters, lengths, strict=True)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        hidden = model.hidden(torch.cat(sequences), positions, packed_causal(lengths, model.arch), lora)
        together = model.logits(hidden, lora).split(lengths)
        for adapter, tokens, logits in zip(adapters, sequences, together, strict=True):
            torch.testing.assert_close(logits, _logits(model, tokens, adapter), rtol=0, atol=1e-5)


def test_base_weights_get_no_gradient(tmp_path: Path) -> None:
    model = load_transformer(tiny_llama(tmp_path / "model"))
    leaf = Adapter.create(model.arch, LoraSpec(rank=2, seed=0))
    leaf = leaf.with_params(leaf.params.requires_grad_())
    _logits(model, TOKENS, leaf).sum().backward()
    weights = [model.embedding_VD, model.unembedding_VD, model.norm_D, *vars(model.layers[0]).values()]
    assert all(not weight.requires_grad and weight.grad is None for weight in weights if weight is not None)
    assert leaf.params.grad is not None
    assert leaf.params.grad.shape == leaf.params.shape
