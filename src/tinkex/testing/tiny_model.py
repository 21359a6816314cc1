"""Writes a tiny random Llama as a Hugging Face directory, in about a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tinkex.errors import SetupError

__all__ = ["write_tiny_model"]

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 320, 32, 64, 2, 4, 2, 8
BEGIN, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Writes the model (about 40 thousand weights, context 256) and its tokenizer, and returns the directory.

    The same seed gives the same weights on every machine.
    """
    try:
        from safetensors.numpy import save_file
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the test model needs {error.name}; install it with: pip install 'tinkex[engine]'"
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    begin, end = _write_tokenizer(directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": begin,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"bos_token_id": begin, "eos_token_id": end})
    save_file(
        _weights(np.random.default_rng(seed)), directory / "model.safetensors", metadata={"format": "pt"}
    )
    return directory


def _weights(random: np.random.Generator) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
            f"{name}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{name}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{name}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{name}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return {
        name: (
            np.ones(shape, np.float32)
            if len(shape) == 1
            else random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        )
        for name, shape in shapes.items()
    }


def _write_tokenizer(directory: Path) -> tuple[int, int]:
    """Writes a byte-level tokenizer with two special tokens; returns their ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={char: token_id for token_id, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BEGIN, special=True), AddedToken(END, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": BEGIN, "eos_token": END, "pad_token": END}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write(directory / "tokenizer_config.json", {**described, "chat_template": CHAT_TEMPLATE, **special})
    _write(directory / "special_tokens_map.json", special)
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    assert begin is not None
    assert end is not None
    return int(begin), int(end)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
