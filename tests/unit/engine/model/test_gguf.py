from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from hypothesis import given, settings
from safetensors.numpy import load_file

from tests.models import CHAT_TEMPLATE, tiny_llama
from tests.unit.engine.model.test_gguf_sentencepiece import metadata, plainly
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.gguf import convert_gguf
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.errors import SetupError

pytestmark = pytest.mark.slow

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of a head: dimension 0, dimension h, dimension 1, dimension h + 1…"""
    head_dim = weight.shape[0] // num_heads
    order = np.arange(head_dim).reshape(2, head_dim // 2).T.ravel()
    rows = np.concatenate([head * head_dim + order for head in range(num_heads)])
    return weight[rows]


def write_gguf(
    directory: Path,
    path: Path,
    quantization: Quantization = Quantization.F32,
    *,
    pre: str = "smollm",
    tokenizer_model: str = "gpt2",
    pieces: dict[str, Any] | None = None,
    raw: dict[str, tuple[Quantization, np.ndarray]] | None = None,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """The model in ``directory`` as llama.cpp would store it."""
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, arch, endianess=endianess)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    if pieces is None:
        vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
        special = {token["id"] for token in tokenizer["added_tokens"]}
        writer.add_token_list([token for token, _ in vocab])
        writer.add_token_types([3 if place in special else 1 for _, place in vocab])
        writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    else:
        writer.add_token_list(pieces["tokenizer.ggml.tokens"])
        writer.add_token_types(pieces["tokenizer.ggml.token_type"])
        writer.add_token_scores(pieces["tokenizer.ggml.scores"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for key, value in (extra or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, weight in {**load_file(directory / "model.safetensors"), **(tensors or {})}.items():
        stored = weight
        if name in (raw or {}):
            raw_kind, blocks = (raw or {})[name]
            writer.add_tensor(_gguf_name(name), blocks, raw_dtype=raw_kind)
            continue
        if arch == "llama" and ".q_proj." in name:
            stored = _interleaved(weight, config["num_attention_heads"])
        elif arch == "llama" and ".k_proj." in name:
            stored = _interleaved(weight, config["num_key_value_heads"])
        kind = quantization if weight.ndim == 2 else Quantization.F32
        target = name if name in (tensors or {}) else _gguf_name(name)
        writer.add_tensor(target, gguf.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _logits(directory: Path) -> torch.Tensor:
    model = load_transformer(directory)
    tokens = torch.arange(3, 30)
    with torch.no_grad():
        hidden = model.hidden(tokens, torch.arange(len(tokens)), packed_causal([len(tokens)], model.arch))
        return model.logits(hidden)


@pytest.mark.parametrize(
    ("family", "tie", "config"),
    [
        ("llama", True, {}),
        ("llama", False, {"attention_bias": True}),
        ("llama", False, {"attention_bias": True, "mlp_bias": True}),
        ("mistral", False, {"sliding_window": 7}),
        ("qwen2", True, {}),
        ("qwen3", False, {}),
    ],
)
def test_an_unquantised_model_comes_back_with_the_same_logits(
    tmp_path: Path, family: str, tie: bool, config: dict[str, Any]
) -> None:
    original = tiny_llama(tmp_path / "original", family=family, tie=tie, config=config)
    converted = tmp_path / "converted"
    convert_gguf(write_gguf(original, tmp_path / "model.gguf"), converted)
    assert torch.equal(_logits(converted), _logits(original))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_come_back_dequantised_and_in_order(tmp_path: Path, name: str) -> None:
    quantization = Quantization[name]
    original = tiny_llama(tmp_path / "original")
    convert_gguf(write_gguf(original, tmp_path / "model.gguf", quantization), tmp_path / "converted")
    expected, found = (load_file(tmp_path / part / "model.safetensors") for part in ("original", "converted"))
    assert expected.keys() == found.keys()
    for tensor, weight in expected.items():
        kind = quantization if weight.ndim == 2 else Quantization.F32
        np.testing.assert_array_equal(found[tensor], gguf.dequantize(gguf.quantize(weight, kind), kind))


def _q4_k(block: np.ndarray) -> list[float]:
    """256 numbers of a Q4_K block, one after the other, by the layout's definition."""
    d, d_min = np.frombuffer(block[:4].tobytes(), np.float16).astype(np.float32)
    values = []
    for group in range(8):
        scale, low = _scale_and_min(block[4:16], group)
        for place in range(32):
            byte = int(block[16 + group // 2 * 32 + place])
            values.append(float(d * scale * (byte >> 4 if group % 2 else byte & 15) - d_min * low))
    return values


def _q5_k(block: np.ndarray) -> list[float]:
    d, d_min = np.frombuffer(block[:4].tobytes(), np.float16).astype(np.float32)
    values = []
    for group in range(8):
        scale, low = _scale_and_min(block[4:16], group)
        for place in range(32):
            byte = int(block[48 + group // 2 * 32 + place])
            high = int(block[16 + place]) >> group & 1
            values.append(
                float(d * scale * ((byte >> 4 if group % 2 else byte & 15) + 16 * high) - d_min * low)
            )
    return values


def _q6_k(block: np.ndarray) -> list[float]:
    d = np.frombuffer(block[208:210].tobytes(), np.float16).astype(np.float32)[0]
    scales = np.frombuffer(block[192:208].tobytes(), np.int8)
    values = []
    for place in range(256):
        half, quarter, column = place // 128, place % 128 // 32, place % 32
        low = int(block[half * 64 + quarter % 2 * 32 + column])
        nibble = low >> 4 if quarter >= 2 else low & 15
        high = int(block[128 + half * 32 + column]) >> (2 * quarter) & 3
        values.append(float(d * scales[place // 16] * ((nibble | high << 4) - 32)))
    return values


def _scale_and_min(packed: np.ndarray, group: int) -> tuple[int, int]:
    """Eight pairs of six bits in twelve bytes: the last four pairs keep their high bits in the first eight bytes."""
    numbers = [int(byte) for byte in packed]
    if group < 4:
        return numbers[group] & 63, numbers[group + 4] & 63
    return (
        numbers[group + 4] & 15 | numbers[group - 4] >> 6 << 4,
        numbers[group + 4] >> 4 | numbers[group] >> 6 << 4,
    )


def _half(block: np.ndarray, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2].tobytes(), np.float16)[0])


def _q2_k(block: np.ndarray) -> list[float]:
    d, d_min = _half(block, 80), _half(block, 82)
    values = []
    for place in range(256):
        half, quarter, column = place // 128, place % 128 // 32, place % 32
        scale, code = int(block[place // 16]), int(block[16 + half * 32 + column]) >> (2 * quarter) & 3
        values.append(d * (scale & 15) * code - d_min * (scale >> 4))
    return values


def _q3_k(block: np.ndarray) -> list[float]:
    d, packed = _half(block, 108), [int(byte) for byte in block[96:108]]
    values = []
    for place in range(256):
        half, quarter, column = place // 128, place % 128 // 32, place % 32
        group = place // 16
        low = packed[group] & 15 if group < 8 else packed[group - 8] >> 4
        scale = low | (packed[8 + group % 4] >> (2 * (group // 4)) & 3) << 4
        code = int(block[32 + half * 32 + column]) >> (2 * quarter) & 3
        high = int(block[column]) >> (4 * half + quarter) & 1
        values.append(d * (scale - 32) * (code - (0 if high else 4)))
    return values


def _nibbles(packed: np.ndarray) -> list[int]:
    return [int(byte) & 15 for byte in packed] + [int(byte) >> 4 for byte in packed]


def _fifth_bits(packed: np.ndarray) -> list[int]:
    bits = int.from_bytes(packed.tobytes(), "little")
    return [(bits >> place & 1) << 4 for place in range(32)]


def _q4_0(block: np.ndarray) -> list[float]:
    return [_half(block, 0) * (code - 8) for code in _nibbles(block[2:])]


def _q4_1(block: np.ndarray) -> list[float]:
    return [_half(block, 0) * code + _half(block, 2) for code in _nibbles(block[4:])]


def _q5_0(block: np.ndarray) -> list[float]:
    codes = zip(_nibbles(block[6:]), _fifth_bits(block[2:6]), strict=True)
    return [_half(block, 0) * ((low | high) - 16) for low, high in codes]


def _q5_1(block: np.ndarray) -> list[float]:
    codes = zip(_nibbles(block[8:]), _fifth_bits(block[4:8]), strict=True)
    return [_half(block, 0) * (low | high) + _half(block, 2) for low, high in codes]


def _q8_0(block: np.ndarray) -> list[float]:
    return [_half(block, 0) * int(code) for code in block[2:].view(np.int8)]


def _iq4_nl(block: np.ndarray) -> list[float]:
    steps = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return [_half(block, 0) * steps[code] for code in _nibbles(block[2:])]


LAYOUTS = {  # bytes of a block, where its halves lie, and its numbers
    "Q4_0": (18, (0,), _q4_0),
    "Q4_1": (20, (0, 2), _q4_1),
    "Q5_0": (22, (0,), _q5_0),
    "Q5_1": (24, (0, 2), _q5_1),
    "Q8_0": (34, (0,), _q8_0),
    "IQ4_NL": (18, (0,), _iq4_nl),
    "Q2_K": (84, (80, 82), _q2_k),
    "Q3_K": (110, (108,), _q3_k),
    "Q4_K": (144, (0, 2), _q4_k),
    "Q5_K": (176, (0, 2), _q5_k),
    "Q6_K": (210, (208,), _q6_k),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_quantised_blocks_are_read_by_their_layout(tmp_path: Path, name: str) -> None:
    """Random bytes, read here one number at a time by the definition of each layout."""
    num_bytes, halves_at, decode = LAYOUTS[name]
    original = tiny_llama(tmp_path / "original", layers=1, hidden=256, vocab=512, intermediate=32)
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (32 * (1 if name.endswith("K") else 8), num_bytes), dtype=np.uint8)
    for at in halves_at:
        blocks[:, at : at + 2] = rng.normal(0, 1e-3, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    tensor = "model.layers.0.mlp.up_proj.weight"
    stored = blocks.reshape(32, -1)
    path = write_gguf(original, tmp_path / "model.gguf", raw={tensor: (Quantization[name], stored)})
    convert_gguf(path, tmp_path / "converted")
    found = load_file(tmp_path / "converted" / "model.safetensors")[tensor]
    assert found.shape == (32, 256)
    expected = np.array([decode(block) for block in blocks]).reshape(32, 256)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_tokenizer_comes_back_with_its_special_tokens_and_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    original = tiny_llama(tmp_path / "original")
    convert_gguf(write_gguf(original, tmp_path / "model.gguf"), tmp_path / "converted")
    ours, reference = EngineTokenizer(tmp_path / "converted"), EngineTokenizer(original)
    official = AutoTokenizer.from_pretrained(tmp_path / "converted")
    for text in ["In 2024 it was 12345.", "漢字 🙂  x", "<|im_start|>user\nhi<|im_end|>\n"]:
        assert ours.encode(text) == reference.encode(text) == official.encode(text)
    assert ours.encode("2024") == [token for digit in "2024" for token in ours.encode(digit)]
    assert ours.chat_template == CHAT_TEMPLATE
    assert ours.eos_token_ids == (2,)
    assert len(official) == reference.vocab_size
    assert (official.eos_token_id, official.pad_token_id, official.bos_token_id) == (2, 2, 1)


@pytest.mark.slow
def test_a_llama_2_file_comes_back_with_its_sentencepiece_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    original = tiny_llama(tmp_path / "original", tie=False)
    path = write_gguf(original, tmp_path / "model.gguf", tokenizer_model="llama", pieces=metadata())
    convert_gguf(path, tmp_path / "converted")
    assert torch.equal(_logits(tmp_path / "converted"), _logits(original))
    ours, official = (
        EngineTokenizer(tmp_path / "converted"),
        AutoTokenizer.from_pretrained(tmp_path / "converted"),
    )
    for text in ["the abc in there", "漢字 🙂"]:
        assert ours.encode(text) == official.encode(text) == plainly(text)
    assert (ours.decode(plainly("the abc")), ours.eos_token_ids) == ("the abc", (2,))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 123 cd", ["ab", " 123", " cd"]),
        ("qwen2", "ab 123 cd", ["ab", " ", "1", "2", "3", " cd"]),
        ("llama-bpe", "ab 1234 cd", ["ab", " ", "123", "4", " cd"]),
        ("smollm", "ab 123 cd", ["ab", " ", "1", "2", "3", " cd"]),
    ],
)
def test_words_are_cut_as_the_pre_tokenizer_says(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    from tokenizers import Tokenizer

    original = tiny_llama(tmp_path / "original")
    convert_gguf(write_gguf(original, tmp_path / "model.gguf", pre=pre), tmp_path / "converted")
    tokenizer = Tokenizer.from_file(str(tmp_path / "converted" / "tokenizer.json"))
    assert [word.replace("Ġ", " ") for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_rope_scaling_of_llama_3_is_recognised_by_its_factors(tmp_path: Path) -> None:
    from tinkex.engine.model.rope import RopeConfig, Rotary

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = tiny_llama(tmp_path / "original", config={"rope_theta": 500000.0})
    plain = Rotary(RopeConfig(theta=500000.0), 16).inverse_frequencies_h
    scaled = Rotary(RopeConfig.from_config({"rope_theta": 500000.0, "rope_scaling": scaling}), 16)
    factors = (plain / scaled.inverse_frequencies_h).numpy()
    path = write_gguf(original, tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors})
    convert_gguf(path, tmp_path / "converted")
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["rope_scaling"] == scaling
    load_transformer(tmp_path / "converted")

    odd = write_gguf(original, tmp_path / "odd.gguf", tensors={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(SetupError, match="not those of Llama 3"):
        convert_gguf(odd, tmp_path / "odd")


def test_linear_and_yarn_rope_scaling_are_kept(tmp_path: Path) -> None:
    original = tiny_llama(tmp_path / "original")
    for kind in ("linear", "yarn"):
        extra = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
        convert_gguf(write_gguf(original, tmp_path / f"{kind}.gguf", extra=extra), tmp_path / kind)
        rope = load_transformer(tmp_path / kind).arch.rope
        assert (rope.kind, rope.factor) == (kind, 4.0)


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({"llama.rope.scaling.factor": 4.0}, "linear"),
        ({"llama.rope.scale_linear": 4.0}, "linear"),
        ({"llama.rope.scaling.factor": 0.0}, "default"),
        ({"llama.rope.scaling.type": "linear"}, "default"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, "default"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scale_linear": 4.0}, "default"),
    ],
)
def test_a_rope_factor_without_a_type_is_linear(tmp_path: Path, extra: dict[str, Any], kind: str) -> None:
    original = tiny_llama(tmp_path / "original")
    convert_gguf(write_gguf(original, tmp_path / "model.gguf", extra=extra), tmp_path / "converted")
    assert load_transformer(tmp_path / "converted").arch.rope.kind == kind


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"extra": {"llama.expert_count": 8.0}}, "with experts"),
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
        (
            {
                "extra": {
                    "llama.rope.scaling.type": "yarn",
                    "llama.rope.scaling.factor": 4.0,
                    "llama.rope.scaling.yarn_beta_fast": 8.0,
                }
            },
            r"llama\.rope\.scaling\.yarn_beta_fast of the GGUF file",
        ),
        ({"extra": {"llama.attention.sliding_window": [8, 8]}}, "sliding_window per layer"),
        ({"extra": {"split.count": 3}}, "one of 3 parts"),
        ({"extra": {"general.type": "adapter"}}, "contains 'adapter', not a model"),
        ({"extra": {"llama.attention.causal": False}}, r"llama\.attention\.causal"),
        (
            {
                "extra": {"llama.rope.scaling.factor": 4.0},
                "tensors": {"rope_freqs.weight": np.ones(8, np.float32)},
            },
            "both rope factors and rope scaling 'linear'",
        ),
        ({"endianess": gguf.GGUFEndian.BIG}, "byte order"),
        ({"pre": "tekken"}, "tekken"),
        ({"pre": "deepseek-llm"}, "deepseek-llm"),
        ({"tokenizer_model": "llama"}, "tokenizer.ggml.scores"),
        ({"tokenizer_model": "t5"}, "tokenizer model 't5'"),
        ({"tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((64, 64), np.float32)}}, "ffn_gate_exps"),
    ],
)
def test_what_cannot_be_rebuilt_exactly_is_rejected_and_named(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    original = tiny_llama(tmp_path / "original")
    with pytest.raises(SetupError, match=words):
        convert_gguf(write_gguf(original, tmp_path / "model.gguf", **settings), tmp_path / "converted")


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"something else entirely"]
)
def test_a_corrupt_file_is_a_setup_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(SetupError, match="cannot be read as a GGUF file"):
        convert_gguf(path, tmp_path / "converted")


def test_progress_counts_up_to_all_weights(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    original = tiny_llama(tmp_path / "original")
    path = write_gguf(original, tmp_path / "model.gguf")
    convert_gguf(path, tmp_path / "converted", lambda *report: seen.append(report))
    done = [report for report in seen if report[0] == "converting weights"]
    assert [count for _, count, _ in done] == sorted(count for _, count, _ in done)
    assert done[-1][1] == done[-1][2]


@pytest.fixture(scope="module")
def valid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("valid")
    original = tiny_llama(directory / "original", layers=1)
    return write_gguf(original, directory / "model.gguf", Quantization.Q8_0)


def rejection_of(file: Path, directory: Path) -> str:
    """Why a file is rejected; empty if it is converted."""
    try:
        convert_gguf(file, directory)
    except SetupError as error:
        return str(error)
    return ""


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_file_with_wrong_bytes_is_converted_or_rejected(
    valid_file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(valid_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of the positions are in the first values, whose lengths and kinds decide how the rest is read.
        at = data.draw(st.one_of(st.integers(0, 900), st.integers(0, len(content) - 1)))
        content[at] = data.draw(st.integers(0, 255))
    directory = tmp_path_factory.mktemp("wrong")
    (directory / "wrong.gguf").write_bytes(content)
    rejection = rejection_of(directory / "wrong.gguf", directory / "converted")
    assert not rejection or "GGUF" in rejection


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(
        [
            *(
                "llama.block_count",
                "llama.context_length",
                "llama.embedding_length",
                "llama.feed_forward_length",
            ),
            *("llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length"),
            *("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "llama.rope.dimension_count"),
            *("llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.attention.sliding_window"),
            *("general.type", "general.architecture", "split.count", "llama.attention.causal"),
            *("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.chat_template"),
        ]
    ),
    value=st.one_of(
        *(st.integers(-2, 3), st.floats(width=32), st.text(max_size=4), st.booleans()),
        st.lists(st.integers(-2, 3), min_size=1, max_size=3),
    ),
)
def test_a_file_with_an_odd_value_is_converted_or_rejected(
    valid_file: Path, tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    directory = tmp_path_factory.mktemp("odd")
    write_gguf(valid_file.parent / "original", directory / "odd.gguf", extra={key: value})
    rejection = rejection_of(directory / "odd.gguf", directory / "converted")
    assert not rejection or "GGUF" in rejection


@pytest.mark.parametrize("value", [0, -1, "many", 1.5, True])
def test_a_size_that_is_not_a_positive_number_is_named(tmp_path: Path, value: Any) -> None:
    original = tiny_llama(tmp_path / "original", layers=1)
    path = write_gguf(original, tmp_path / "odd.gguf", extra={"llama.attention.head_count": value})
    with pytest.raises(SetupError, match=r"llama\.attention\.head_count is .*, not a positive number"):
        convert_gguf(path, tmp_path / "converted")
