"""Tiny random models, written as ordinary Hugging Face directories in well under two seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

__all__ = ["CHAT_TEMPLATE", "tiny_llama", "tiny_tokenizer"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog while the small model reads a short story about the sea.",
    "A model is trained by showing it the same text again and again, until it can say what comes next.",
    "What is the capital of France? The capital of France is Paris. What is two plus two? Two plus two is four.",
    "def add(first, second):\n    return first + second\n\nprint(add(1, 2))\n",
    "Once upon a time there was a river; the river ran to the sea, and the sea ran to the sky.",
]


def tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    family: str = "llama",
    tie: bool = True,
    vocab: int = 512,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    context: int = 512,
    config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    num_shards: int = 1,
) -> Path:
    """Writes a random model of ``family`` and its tokenizer into ``directory``, and returns it.

    ``config`` overrides entries of ``config.json`` (``rope_scaling``, ``sliding_window``, ``attention_bias``…).
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": dtype,
        **({"sliding_window": None} if family == "mistral" else {}),
        **(config or {}),
    }
    _write_json(directory / "config.json", settings)
    _write_json(
        directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    )
    _write_weights(directory, _weights(settings, np.random.default_rng(seed)), dtype, num_shards)
    tiny_tokenizer(directory, vocab=vocab)
    return directory


def tiny_tokenizer(directory: Path, *, vocab: int = 512) -> Path:
    """Writes a byte-level BPE tokenizer with at most ``vocab`` entries, a chat template and special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    _write_json(directory / "special_tokens_map.json", special)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            **special,
        },
    )
    return directory


def _weights(config: Mapping[str, Any], random: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    family = config["model_type"]
    qkv_bias = family == "qwen2" or (family in {"llama", "qwen3"} and config["attention_bias"])
    output_bias = family in {"llama", "qwen3"} and config["attention_bias"]
    mlp_bias = family == "llama" and config.get("mlp_bias", False)

    def projection(name: str, fan_in: int, fan_out: int, bias: bool) -> dict[str, np.ndarray]:
        weight = random.normal(0, fan_in**-0.5, (fan_out, fan_in))
        tensors = {f"{name}.weight": weight}
        return tensors | {f"{name}.bias": random.normal(0, 0.1, fan_out)} if bias else tensors

    def norm(name: str, size: int) -> dict[str, np.ndarray]:
        return {f"{name}.weight": 1 + random.normal(0, 0.1, size)}

    # Small embeddings keep tied logits near one, so that sampling from a tiny model is not a foregone conclusion.
    weights = {"model.embed_tokens.weight": random.normal(0, 0.1, (vocab, hidden))}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= norm(f"{name}.input_layernorm", hidden)
        weights |= projection(f"{name}.self_attn.q_proj", hidden, q_size, qkv_bias)
        weights |= projection(f"{name}.self_attn.k_proj", hidden, kv_size, qkv_bias)
        weights |= projection(f"{name}.self_attn.v_proj", hidden, kv_size, qkv_bias)
        weights |= projection(f"{name}.self_attn.o_proj", q_size, hidden, output_bias)
        if family == "qwen3":
            weights |= norm(f"{name}.self_attn.q_norm", config["head_dim"])
            weights |= norm(f"{name}.self_attn.k_norm", config["head_dim"])
        weights |= norm(f"{name}.post_attention_layernorm", hidden)
        weights |= projection(f"{name}.mlp.gate_proj", hidden, inner, mlp_bias)
        weights |= projection(f"{name}.mlp.up_proj", hidden, inner, mlp_bias)
        weights |= projection(f"{name}.mlp.down_proj", inner, hidden, mlp_bias)
    weights |= norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = random.normal(0, 0.1, (vocab, hidden))
    return weights


def _write_weights(directory: Path, weights: dict[str, np.ndarray], dtype: str, num_shards: int) -> None:
    tensors = {name: weight.astype(np.float32) for name, weight in weights.items()}
    if num_shards == 1:
        _save(directory / "model.safetensors", tensors, dtype)
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        _save(directory / file, {name: tensors[name] for name in mine}, dtype)
        weight_map |= dict.fromkeys(mine, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def _save(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    if dtype == "bfloat16":
        import torch
        from safetensors.torch import save_file as save_torch_file

        save_torch_file(
            {name: torch.from_numpy(tensor).bfloat16() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
        return
    save_file(
        {name: tensor.astype(dtype) for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
