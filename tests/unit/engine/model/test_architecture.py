from __future__ import annotations

from typing import Any

import pytest

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.rope import Rotary
from tinkex.errors import SetupError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def _of(family: str) -> dict[str, Any]:
    return LLAMA | {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}


def test_sizes_are_read_from_config_json() -> None:
    arch = Architecture.from_config(LLAMA | {"max_position_embeddings": 8192, "tie_word_embeddings": True})
    assert (arch.family, arch.num_layers, arch.num_heads, arch.num_kv_heads) == ("llama", 4, 9, 3)
    assert (arch.head_dim, arch.max_context, arch.tie_embeddings) == (64, 8192, True)
    assert not any([arch.attention_bias, arch.output_bias, arch.mlp_bias, arch.qk_norm])


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": None, "model_type": "gemma3"}, "gemma3"),
        *(
            ({"architectures": [name]}, name)
            for name in (
                "Gemma2ForCausalLM",
                "Gemma3ForConditionalGeneration",
                "Phi3ForCausalLM",
                "PhimoeForCausalLM",
                "Qwen2MoeForCausalLM",
                "Qwen2VLForConditionalGeneration",
                "Qwen3NextForCausalLM",
                "DeepseekV3ForCausalLM",
                "GptOssForCausalLM",
                "GPT2LMHeadModel",
                "GraniteForCausalLM",
                "Mistral3ForConditionalGeneration",
                "Olmo2ForCausalLM",
                "SmolLM3ForCausalLM",
            )
        ),
    ],
)
def test_another_architecture_is_rejected_and_named(config: dict[str, Any], name: str) -> None:
    with pytest.raises(SetupError, match=name):
        Architecture.from_config(LLAMA | config)


def test_a_model_type_stands_in_for_missing_architectures() -> None:
    assert Architecture.from_config(LLAMA | {"architectures": None}).family == "llama"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *(
            ({"quantization_config": {"quant_method": method}}, method)
            for method in ("gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4")
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "512"}, "vocab_size"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "mrope"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 2}, "not a multiple of 2"),
        ({"head_dim": 7}, "odd head_dim of 7"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            "low_freq_factor .* is 4, high_freq_factor 1",
        ),
        ({"is_causal": False}, "is_causal is false"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 1}}}, "per_layer_config"),
        ({"transformers_weights": "other.safetensors"}, r"other\.safetensors"),
        ({"model_type": "qwen3"}, "LlamaForCausalLM, its model_type 'qwen3'"),
        ({"model_type": "granite"}, "LlamaForCausalLM, its model_type 'granite'"),
    ],
)
def test_what_cannot_be_honoured_is_rejected_and_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        Architecture.from_config(LLAMA | config)


def test_generation_config_has_the_last_word_on_end_tokens() -> None:
    config = LLAMA | {"eos_token_id": 5}
    assert Architecture.from_config(config).eos_token_ids == (5,)
    assert Architecture.from_config(config, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert Architecture.from_config(config, {"eos_token_id": None}).eos_token_ids == (5,)


def test_every_mistral_layer_slides_and_qwen_layers_slide_by_flag() -> None:
    mistral = Architecture.from_config(_of("Mistral") | {"sliding_window": 16})
    assert [mistral.window(layer) for layer in range(4)] == [16] * 4
    qwen = _of("Qwen2") | {"sliding_window": 16, "max_window_layers": 3}
    assert Architecture.from_config(qwen).sliding_window is None
    assert Architecture.from_config(qwen | {"use_sliding_window": True}).window(2) is None
    assert Architecture.from_config(qwen | {"use_sliding_window": True}).window(3) == 16


KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_layers_slide_as_they_are_named(family: str) -> None:
    config = _of(family) | {"sliding_window": 16, "use_sliding_window": True, "layer_types": KINDS}
    arch = Architecture.from_config(config)
    assert [arch.window(layer) for layer in range(4)] == [16, None, None, 16]
    assert Architecture.from_config(config | {"layer_types": ["full_attention"] * 4}).sliding_window is None


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {"sliding_window": 16}),
        ("Qwen3", {"sliding_window": None, "use_sliding_window": True}),
    ],
)
def test_sliding_layers_without_a_window_are_rejected(family: str, config: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="has sliding_attention layers, and there is no sliding_window"):
        Architecture.from_config(_of(family) | {"layer_types": KINDS} | config)


def test_yarn_stretches_the_context_a_config_states() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = LLAMA | {"max_position_embeddings": 1024}
    assert Architecture.from_config(config).max_context == 1024
    assert Architecture.from_config(config | {"rope_scaling": yarn}).max_context == 4096
    assert (
        Architecture.from_config(LLAMA | {"max_position_embeddings": 8192, "rope_scaling": yarn}).max_context
        == 8192
    )


def test_rope_theta_is_found_in_both_generations_of_config_files() -> None:
    older = Architecture.from_config(LLAMA | {"rope_theta": 500.0})
    newer = Architecture.from_config(
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    )
    assert older.rope == newer.rope
    assert older.rope.theta == 500.0


WEIRD: list[Any] = [
    -1, 0, 10**12, 1.5, float("inf"), float("nan"), "x", "", [], [1], {}, {"a": 1}, True, 1e-300,
]  # fmt: skip
ROPE = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_value_of_any_kind_in_any_field_is_read_or_rejected_and_named(architecture: str) -> None:
    config = _of(architecture) | {"rope_scaling": ROPE, "use_sliding_window": True}
    fields = [*config, "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "eos_token_id"]
    fields += [
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "layer_types",
        "max_window_layers",
        "hidden_act",
        "is_causal",
        "per_layer_config",
    ]
    changed = [{**config, field: value} for field in fields for value in WEIRD]
    parts = [*ROPE, "beta_fast", "beta_slow", "attention_factor", "mscale", "truncate", "rope_theta", "type"]
    changed += [{**config, "rope_scaling": {**ROPE, part: value}} for part in parts for value in WEIRD]
    rejected = 0
    for each in changed:
        try:
            arch = Architecture.from_config(each)
            Rotary(arch.rope, arch.head_dim)
        except SetupError:
            rejected += 1
    assert rejected > len(changed) / 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rms_norm_eps": "tiny"}, "'rms_norm_eps', and has 'tiny'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings', and has 1"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"rope_scaling": "linear"}, "an object as 'rope_scaling'"),
        ({"architectures": "LlamaForCausalLM"}, "a list of strings as 'architectures'"),
        ({"eos_token_id": [2, "three"]}, "eos_token_id"),
    ],
)
def test_a_value_that_makes_no_sense_is_shown(config: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        Architecture.from_config(LLAMA | config)
