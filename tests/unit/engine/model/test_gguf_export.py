"""Models as GGUF files: our own reader gets back what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

from tests.models import tiny_llama
from tests.unit.engine.model.test_gguf_sentencepiece import metadata as sentencepiece_metadata
from tinkex.engine.model.attention import packed_causal
from tinkex.engine.model.gguf import convert_gguf
from tinkex.engine.model.gguf_export import export_gguf
from tinkex.engine.model.gguf_vocabulary import describe_tokenizer
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.lora import Adapter, LoraSpec
from tinkex.engine.model.stored_tensors import read_architecture
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.errors import InvalidInput, SetupError
from tinkex.testing.tiny_model import write_tiny_model
from tinkex.tokenizers.gguf_metadata import read_metadata
from tinkex.tokenizers.gguf_tokenizer import build_pre_tokenizer, build_tokenizer

TOKENS = torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(5))
TEXT = "What is the capital of France? 12 + 30 = 42\n"


def logits(directory: Path) -> torch.Tensor:
    model = load_transformer(directory)
    attend = packed_causal([len(TOKENS)], model.arch)
    with torch.no_grad():
        return model.logits(model.hidden(TOKENS, torch.arange(len(TOKENS)), attend))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_of_16_bits_comes_back_bit_for_bit(tmp_path: Path, family: str) -> None:
    base = tiny_llama(tmp_path / "base", family=family, tie=family == "llama", dtype="float16")
    # Norms and biases stay fp32 in the file, which holds 16 bits exactly.
    convert_gguf(export_gguf(base, tmp_path / "model.gguf"), tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again"), logits(base))
    ours, again = EngineTokenizer(base), EngineTokenizer(tmp_path / "again")
    assert again.encode(TEXT) == ours.encode(TEXT)
    assert again.chat_template == ours.chat_template
    assert again.special_tokens == ours.special_tokens
    assert again.eos_token_ids == ours.eos_token_ids


def test_8_bits_are_within_half_a_step_of_each_block(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    file = export_gguf(base, tmp_path / "model.gguf", gguf_type="q8_0")
    convert_gguf(file, tmp_path / "again")
    before, after = load_transformer(base), load_transformer(tmp_path / "again")
    for one, other in zip(before.layers, after.layers, strict=True):
        blocks, rounded = (layer.down_DF.reshape(-1, 32) for layer in (one, other))
        step = blocks.abs().amax(1, keepdim=True) / 127
        # Half a step, and what the scale loses as a number of 16 bits.
        assert ((blocks - rounded).abs() <= step * 0.5 + blocks.abs() * 2e-3).all()
        assert torch.equal(one.input_norm_D, other.input_norm_D)
    assert file.stat().st_size < 0.6 * export_gguf(base, tmp_path / "half.gguf").stat().st_size


def test_rope_of_every_kind_comes_back(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for number, scaling in enumerate(
        [
            {**llama3, "original_max_position_embeddings": 8192},
            {"rope_type": "linear", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ]
    ):
        base = tiny_llama(tmp_path / f"base-{number}", config={"rope_scaling": scaling, "rope_theta": 5e5})
        convert_gguf(export_gguf(base, tmp_path / f"{number}.gguf"), tmp_path / f"again-{number}")
        assert read_architecture(tmp_path / f"again-{number}").rope == read_architecture(base).rope


def test_a_window_bounds_the_context_of_the_file(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", family="mistral", config={"sliding_window": 64})
    described = read_metadata(export_gguf(base, tmp_path / "model.gguf"))
    assert (described["llama.context_length"], described["llama.attention.sliding_window"]) == (64, 64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"family": "qwen3", "config": {"attention_bias": True}}, "biases"),
        (
            {"family": "qwen2", "config": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64}},
            "sliding-window",
        ),
        (
            {"config": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}}},
            "YaRN",
        ),
    ],
)  # fmt: skip
def test_a_model_that_llama_cpp_computes_in_another_way_is_rejected(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    base = tiny_llama(tmp_path / "base", **options)
    with pytest.raises(SetupError, match=f"{words}.*model directory"):
        export_gguf(base, tmp_path / "model.gguf")
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


def test_outputs_that_cannot_be_are_rejected(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_text("keep")
    with pytest.raises(InvalidInput, match="exists already"):
        export_gguf(tiny_model, tmp_path / "mine.gguf")
    assert (tmp_path / "mine.gguf").read_text() == "keep"
    with pytest.raises(InvalidInput, match=r"\.gguf"):
        export_gguf(tiny_model, tmp_path / "model.bin")
    options: Any = {"gguf_type": "q4_0"}
    with pytest.raises(InvalidInput, match=r"q4_0.*f16, q8_0"):
        export_gguf(tiny_model, tmp_path / "new.gguf", **options)
    other = Adapter.create(
        read_architecture(tiny_llama(tmp_path / "other", layers=1)), LoraSpec(rank=2, seed=0)
    )
    with pytest.raises(InvalidInput, match="another model"):
        export_gguf(tiny_model, tmp_path / "new.gguf", other)


def test_progress_counts_up_to_all_weights_and_a_broken_export_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    export_gguf(tiny_model, tmp_path / "model.gguf", progress=lambda *step: seen.append(step))
    done = [done for phase, done, _ in seen if phase == "merging weights"]
    assert done == sorted(done)
    assert done[-1] == seen[-1][2]

    class Stop(Exception):
        pass

    def stop(phase: str, done: int, total: int | None) -> None:
        if done > 50_000:
            raise Stop

    with pytest.raises(Stop):
        export_gguf(tiny_model, tmp_path / "second.gguf", progress=stop)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


def test_weights_beyond_16_bits_are_rejected_with_what_holds_them(tiny_model: Path, tmp_path: Path) -> None:
    adapter = Adapter.create(read_architecture(tiny_model), LoraSpec(rank=2, seed=0))
    large = adapter.with_params(torch.full_like(adapter.params, 1e3))
    with pytest.raises(InvalidInput, match="range of float16; export q8_0"):
        export_gguf(tiny_model, tmp_path / "model.gguf", large)


def test_sentencepiece_tokenizers_keep_their_order_of_merges(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    for prefix in (True, False):
        wanted = sentencepiece_metadata(add_space_prefix=prefix)
        tokenizer = build_tokenizer(wanted)
        tokenizer.save(str(base / "tokenizer.json"))
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            (base / name).write_text(json.dumps(special))
        described = describe_tokenizer(EngineTokenizer(base), 512)
        assert described["tokenizer.ggml.model"] == "llama"
        assert described["tokenizer.ggml.add_space_prefix"] is prefix
        assert described["tokenizer.ggml.add_bos_token"] is True
        rebuilt = build_tokenizer(described)
        for text in ("there in the abc é ere", "  in a  the", "漢字 🙂"):
            assert rebuilt.encode(text).ids == tokenizer.encode(text).ids


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_the_pre_tokenizer_is_recognised_by_what_it_does(tmp_path: Path, name: str) -> None:
    base = tiny_llama(tmp_path / "base")
    _set_pre_tokenizer(base, build_pre_tokenizer(name))
    assert describe_tokenizer(EngineTokenizer(base), 512)["tokenizer.ggml.pre"] == name


def test_a_tokenizer_that_the_format_has_no_name_for_is_rejected(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    _set_pre_tokenizer(base, pre_tokenizers.ByteLevel(add_prefix_space=True))
    with pytest.raises(SetupError, match=r"pre-tokenizer is none of .*convert_hf_to_gguf\.py"):
        describe_tokenizer(EngineTokenizer(base), 512)
    with pytest.raises(SetupError, match="no merges"):
        describe_tokenizer(EngineTokenizer(write_tiny_model(tmp_path / "tiny")), 320)


def _set_pre_tokenizer(base: Path, pre_tokenizer: Any) -> None:
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.save(str(base / "tokenizer.json"))


def test_rows_without_a_token_are_unused(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    num_tokens = EngineTokenizer(base).vocab_size
    described = describe_tokenizer(EngineTokenizer(base), num_tokens + 3)
    assert described["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]
    assert len(described["tokenizer.ggml.tokens"]) == num_tokens + 3
    assert np.unique(described["tokenizer.ggml.tokens"]).size == num_tokens + 3
