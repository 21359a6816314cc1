"""Converts a GGUF file into an ordinary Hugging Face model directory.

Weights are dequantized to fp32. llama.cpp stores the query and key projections of Llama models with the rows of each head
interleaved for its rotary order; the conversion restores the order of halves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.engine.model.progress import Progress, report
from tinkex.engine.model.weight_files import WeightEntry, write_weights
from tinkex.errors import SetupError
from tinkex.tokenizers.gguf_tokenizer import build_tokenizer, special_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Weights = NDArray[np.float32]

__all__ = ["CONVERSION", "ROPE_FACTORS", "TENSORS", "convert_gguf"]

CONVERSION = 2
"""The version of the conversion: directories from another version are converted again."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The name of each tensor on the hub, by its name in GGUF files; both without layer and kind."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with a divisor for each rotary frequency."""
_SCALING = {"type", "factor", "original_context_length", "finetuned"}
_MAX_SHARD_BYTES = 20 << 30


def convert_gguf(source: Path, directory: Path, progress: Progress | None = None) -> None:
    """Writes the model in the GGUF file ``source`` into ``directory``, ready for any Hugging Face tool.

    Raises ``SetupError`` for a file that is corrupt or not supported.

    Example:
        >>> convert_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("SmolLM2-135M-Instruct"))
    """
    report(progress, f"reading {source.name}")
    with _consistent(source):
        _convert(source, directory, progress)


def _convert(source: Path, directory: Path, progress: Progress | None) -> None:
    metadata, tensors = _read(source)
    config = _config(metadata, tensors)
    tokenizer = build_tokenizer(metadata)
    directory.mkdir(parents=True, exist_ok=True)
    _write_weights(directory, config, tensors, progress)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = special_tokens(metadata)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **special,
    }
    if metadata.get("tokenizer.chat_template"):
        tokenizer_config["chat_template"] = metadata["tokenizer.chat_template"]
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    _write_json(directory / "special_tokens_map.json", special)
    _write_json(directory / "generation_config.json", _generation_config(metadata))
    _write_json(directory / "config.json", config)


def read_config(source: Path) -> dict[str, Any]:
    """The ``config.json`` of the model in a GGUF file, without its weights; raises as :func:`convert_gguf` does."""
    with _consistent(source):
        return _config(*_read(source))


@contextmanager
def _consistent(source: Path) -> Iterator[None]:
    """Raises ``SetupError`` where values of the file do not fit together."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SetupError(
            f"{source} is not consistent as a GGUF file ({type(error).__name__}: {error}); download it again"
        ) from error


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the tensors of a GGUF file, by name."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SetupError(
            "reading a .gguf file needs the gguf package: pip install 'tinkex[engine]'"
        ) from error
    try:
        reader = GGUFReader(source)
        if reader.byte_order == "S":
            raise SetupError(
                f"{source} does not have this machine's byte order; convert it with gguf-convert-endian"
            )
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        return metadata, {tensor.name: tensor for tensor in reader.tensors}
    except SetupError:
        raise
    except Exception as error:  # the package checks little of what it reads
        raise SetupError(f"{source} cannot be read as a GGUF file ({error}); download it again") from error


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` that the same model has on the hub."""
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise SetupError(f"the GGUF file contains {kind!r}, not a model; pass the file of the model itself")
    arch = str(metadata.get("general.architecture"))
    if arch not in _ARCHITECTURES or metadata.get(f"{arch}.expert_count"):
        raise SetupError(
            f"architecture {arch!r}{' with experts' if arch in _ARCHITECTURES else ''} of the GGUF file is not supported; "
            f"supported are dense models of {', '.join(_ARCHITECTURES)}"
        )

    parts = metadata.get("split.count") or 1
    if parts != 1:
        raise SetupError(
            f"the GGUF file is one of {parts} parts; merge them with llama-gguf-split --merge, and use the result"
        )

    def required(name: str) -> Any:
        value = metadata.get(f"{arch}.{name}")
        if value is None:
            raise SetupError(f"the GGUF file lacks {arch}.{name}; download it again")
        if isinstance(value, list):
            raise SetupError(
                f"the GGUF file has {arch}.{name} per layer, which is not supported; use a model with uniform layers"
            )
        return value

    def optional(name: str) -> Any:
        return required(name) if metadata.get(f"{arch}.{name}") is not None else None

    if "token_embd.weight" not in tensors:
        raise SetupError("the GGUF file has no token_embd.weight; download it again")
    if optional("attention.causal") is False:
        raise SetupError(
            f"{arch}.attention.causal is false in the GGUF file, so its attention is bidirectional; only causal models "
            "are supported"
        )

    def size(name: str) -> int:
        value = required(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SetupError(
                f"the GGUF file's {arch}.{name} is {value!r:.80}, not a positive number; download it again"
            )
        return value

    hidden, heads = size("embedding_length"), size("attention.head_count")
    context = size("context_length")
    rotated = optional("rope.dimension_count")
    head_dim = int(optional("attention.key_length") or rotated or hidden // heads)
    if rotated is not None and int(rotated) != head_dim:
        raise SetupError(
            f"the GGUF file rotates {rotated} of {head_dim} dimensions of a head, which is not supported"
        )
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(optional("attention.head_count_kv") or heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest(required("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.get(f"{arch}.rope.freq_base") or 10000.0),
        "rope_scaling": _rope_scaling(metadata, tensors, arch, head_dim, context),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    window = optional("attention.sliding_window")
    if arch == "llama" and window:
        # GGUF has Mistral models as llama with a window; on the hub, only the mistral architecture has one.
        config |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": int(window),
        }
    return config


def _rope_scaling(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], arch: str, head_dim: int, context: int
) -> dict[str, Any] | None:
    section = f"{arch}.rope.scaling."
    unknown = sorted(
        key for key in metadata if key.startswith(section) and key[len(section) :] not in _SCALING
    )
    if unknown:
        raise SetupError(
            f"{', '.join(unknown)} of the GGUF file cannot be honoured; use the model's directory"
        )
    # As in llama.cpp: a factor without a type is linear, a factor of 0 means none, and old files call it scale_linear.
    kind = metadata.get(f"{section}type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise SetupError(
            f"rope scaling {kind!r} of the GGUF file is not supported; linear and yarn, with a factor, are"
        )
    stated = metadata.get(f"{section}factor", metadata.get(f"{arch}.rope.scale_linear"))
    factor = 1.0 if kind == "none" else _shortest(stated or 1.0)
    if ROPE_FACTORS in tensors:
        if factor != 1.0:
            raise SetupError(
                f"the GGUF file has both rope factors and rope scaling {kind!r}, which is not supported; use the model's directory"
            )
        theta = float(metadata.get(f"{arch}.rope.freq_base") or 10000.0)
        return _llama3_scaling(np.asarray(tensors[ROPE_FACTORS].data, np.float32), theta, head_dim)
    if factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.get(f"{section}original_context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original or context),
    }


def _llama3_scaling(factors_h: Weights, theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 parameters that give the factors of the file for every frequency."""
    from tinkex.engine.model.rope import RopeConfig, Rotary

    factor = float(factors_h.max())
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = Rotary(RopeConfig(theta=theta), head_dim).inverse_frequencies_h.numpy()
    scaled = RopeConfig.from_config({"rope_scaling": scaling, "rope_theta": theta})
    expected = plain / Rotary(scaled, head_dim).inverse_frequencies_h.numpy()
    if expected.shape != factors_h.shape or not np.allclose(expected, factors_h, rtol=1e-3):
        raise SetupError(
            "the rope factors of the GGUF file are not those of Llama 3; no others are supported"
        )
    return scaling


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(int(token) for token in ends if token is not None))
    config = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": known[0] if len(known) == 1 else known or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in config.items() if value is not None}


def _write_weights(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], progress: Progress | None
) -> None:
    def content(name: str) -> memoryview:
        return np.ascontiguousarray(_dequantized(name, tensors[name], config)).data

    entries = [
        WeightEntry(
            _hub_name(name),
            "F32",
            tuple(int(size) for size in reversed(tensors[name].shape)),
            partial(content, name),
        )
        for name in tensors
        if name != ROPE_FACTORS
    ]
    write_weights(
        directory,
        entries,
        max_shard_bytes=_MAX_SHARD_BYTES,
        phase="converting weights",
        progress=progress,
    )


def _dequantized(name: str, tensor: Any, config: Mapping[str, Any]) -> Weights:
    from gguf import dequantize

    try:
        with np.errstate(all="ignore"):  # the scales of a damaged file may not be finite
            values: Weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise SetupError(
            f"tensor {name} of the GGUF file is stored as {tensor.tensor_type.name}, which the gguf package cannot read"
        ) from error
    if config["model_type"] in {"llama", "mistral"} and ".attn_q." in name:
        return _halves(values, config["num_attention_heads"])
    if config["model_type"] in {"llama", "mistral"} and ".attn_k." in name:
        return _halves(values, config["num_key_value_heads"])
    return values


def _halves(rows: Weights, num_heads: int) -> Weights:
    """Reorders the rows of each head from interleaved pairs (0, h, 1, h + 1, …) to halves (0, 1, …, h, h + 1, …)."""
    per_head = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)


def _hub_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" and len(parts) == 3 else ""
    tensor = TENSORS.get(parts[-1])
    if tensor is None or kind not in {"weight", "bias"}:
        raise SetupError(f"tensor {name} of the GGUF file is not part of a dense Llama or Qwen model")
    return f"{layer}{tensor}.{kind}"


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to this fp32 number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
