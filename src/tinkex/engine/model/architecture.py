"""The architecture of a base model, parsed from its ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.engine.model.config_fields import flag, integer, number, strings
from tinkex.engine.model.rope import RopeConfig
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Architecture", "eos_token_ids"]

_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class _Family:
    """The defaults of a model family that its config files omit, and what its code fixes."""

    model_type: str
    context: int
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool | None = None  # None: config's attention_bias
    output_bias: bool | None = None  # None: config's attention_bias
    mlp_bias: bool | None = None  # None: config's mlp_bias
    qk_norm: bool = False


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", context=2048),
    "MistralForCausalLM": _Family(
        "mistral", context=131072, kv_heads=8, qkv_bias=False, output_bias=False, mlp_bias=False
    ),
    "Qwen2ForCausalLM": _Family(
        "qwen2", context=32768, kv_heads=32, qkv_bias=True, output_bias=False, mlp_bias=False
    ),
    "Qwen3ForCausalLM": _Family(
        "qwen3", context=32768, kv_heads=32, head_dim=128, mlp_bias=False, qk_norm=True
    ),
}


@dataclass(frozen=True)
class Architecture:
    """The architecture of a model of the Llama, Mistral, Qwen2 and Qwen3 dense families.

    Example:
        >>> arch = Architecture.from_config(json.loads((directory / "config.json").read_text()))
        >>> arch.family, arch.num_layers
        ('llama', 30)
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool
    """Whether the q, k and v projections have a bias."""
    output_bias: bool
    """Whether the o projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    """The window of layers with sliding-window attention, in positions, the query's included; None if there are none."""
    sliding_layers: tuple[bool, ...]
    eos_token_ids: tuple[int, ...]

    def window(self, layer: int) -> int | None:
        """How many positions a query of this layer attends to, its own included; None means all before it."""
        return self.sliding_window if self.sliding_layers[layer] else None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> Architecture:
        """Parses a Hugging Face ``config.json``; raises ``SetupError`` for an architecture that is not supported.

        The end-of-text tokens of ``generation_config`` (the content of ``generation_config.json``) take precedence.
        """
        family = _family_of(config)
        _reject_unsupported(config)
        hidden_size = integer(config, "hidden_size")
        num_heads = integer(config, "num_attention_heads")
        num_layers = integer(config, "num_hidden_layers", maximum=_MAX_LAYERS)
        # If the field is absent, the family has a default; if it is null, there are as many as heads.
        absent = "num_key_value_heads" not in config
        num_kv_heads = integer(
            config, "num_key_value_heads", (family.kv_heads if absent else None) or num_heads
        )
        head_dim = integer(config, "head_dim", family.head_dim or max(1, hidden_size // num_heads))
        if num_heads % num_kv_heads:
            raise SetupError(
                f"config.json has {num_heads} attention heads, not a multiple of {num_kv_heads} key/value heads"
            )
        if head_dim % 2:
            raise SetupError(
                f"config.json has an odd head_dim of {head_dim}, which rotary embeddings cannot rotate"
            )
        rope = RopeConfig.from_config({"max_position_embeddings": family.context, **config})
        attention_bias = flag(config, "attention_bias")
        window, sliding_layers = _windows(config, family, num_layers)
        return cls(
            family=family.model_type,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=integer(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=integer(config, "vocab_size"),
            max_context=_max_context(config, family, rope),
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            rope=rope,
            tie_embeddings=flag(config, "tie_word_embeddings"),
            attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=flag(config, "mlp_bias") if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_window=window,
            sliding_layers=sliding_layers,
            eos_token_ids=eos_token_ids(generation_config or {}) or eos_token_ids(config),
        )


def _family_of(config: Mapping[str, Any]) -> _Family:
    by_model_type = {family.model_type: name for name, family in _FAMILIES.items()}
    named = strings(config, "architectures")
    model_type = str(config.get("model_type") or "")
    name = named[0] if named else by_model_type.get(model_type, model_type)
    if name not in _FAMILIES:
        raise SetupError(
            f"architecture {name or 'without a name'!r} is not supported; supported are the dense families "
            f"{', '.join(_FAMILIES)}. Pick a model of one of these"
        )
    family = _FAMILIES[name]
    if model_type not in {"", family.model_type}:
        raise SetupError(
            f"this model's config.json is inconsistent: its architecture is {name}, its model_type {model_type!r}; "
            "fix the one that is wrong"
        )
    return family


def _reject_unsupported(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        )
        raise SetupError(
            f"this model's weights are quantized ({method}), which is not supported; use its unquantized directory or a .gguf file"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise SetupError(
            f"hidden_act {activation!r} in this model's config.json is not supported; only 'silu' is"
        )
    if not flag(config, "is_causal", default=True):
        raise SetupError(
            "is_causal is false in this model's config.json, so its attention is bidirectional; only causal "
            "models are supported"
        )
    if config.get("transformers_weights"):
        raise SetupError(
            f"this model's config.json names its weights ({config['transformers_weights']}), which is not supported; "
            "rename that file to model.safetensors and remove transformers_weights"
        )
    if config.get("per_layer_config"):
        raise SetupError(
            "this model's config.json configures layers individually (per_layer_config), which is not supported; "
            "use a model with uniform layers"
        )


def _max_context(config: Mapping[str, Any], family: _Family, rope: RopeConfig) -> int:
    """The context length; with YaRN, the extended one."""
    stated = integer(config, "max_position_embeddings", family.context)
    return max(stated, int(rope.factor * rope.original_context)) if rope.kind == "yarn" else stated


def _windows(
    config: Mapping[str, Any], family: _Family, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window and the layers that use it."""
    if family.model_type == "llama":
        return None, (False,) * num_layers
    absent = "sliding_window" in config and config["sliding_window"] is None
    used = family.model_type == "mistral" or flag(config, "use_sliding_window")
    window = integer(config, "sliding_window", 4096) if used and not absent else None
    sliding = _sliding_layers(config, family, num_layers, window is not None)
    if window is None and any(sliding):
        raise SetupError(
            "layer_types in this model's config.json has sliding_attention layers, and there is no sliding_window; "
            "set sliding_window, or use full_attention for these layers"
        )
    return (window if any(sliding) else None), sliding


def _sliding_layers(
    config: Mapping[str, Any], family: _Family, num_layers: int, in_use: bool
) -> tuple[bool, ...]:
    """The layers with sliding-window attention: those of ``layer_types``, or the family's default."""
    if config.get("layer_types") is None:
        first = 0 if family.model_type == "mistral" else integer(config, "max_window_layers", 28, minimum=0)
        return tuple(in_use and layer >= first for layer in range(num_layers))
    kinds = strings(config, "layer_types")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise SetupError(
            f"layer_types in this model's config.json must name full_attention or sliding_attention for each of "
            f"{num_layers} layers, and has {len(kinds)} entries of {', '.join(sorted(set(kinds)))}"
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


def eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-text tokens in a ``config.json`` or ``generation_config.json``.

    Example:
        >>> eos_token_ids({"eos_token_id": [2, 7]})
        (2, 7)
    """
    value = config.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(integer({"eos_token_id": token}, "eos_token_id", minimum=0) for token in listed)
