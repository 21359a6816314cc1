"""The beginning of a GGUF file, read as the usual package reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tinkex.errors import SetupError
from tinkex.tokenizers import get_tokenizer
from tinkex.tokenizers.gguf_metadata import read_metadata
from tinkex.tokenizers.light import LightTokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny model's tokenizer, and every kind of value, in a GGUF file."""
    definition = json.loads((tiny_model / "tokenizer.json").read_text())
    config = json.loads((tiny_model / "tokenizer_config.json").read_text())
    tokens = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].__getitem__)
    special = {entry["content"] for entry in definition["added_tokens"]}
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_int64("a.long", -5)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)  # noqa: FBT003 - its own signature
    writer.add_array("a.list", [1, 2, 3])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(
        [" ".join(pair) if isinstance(pair, list) else pair for pair in definition["model"]["merges"]]
    )
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(config["chat_template"])
    writer.add_tensor("output.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_pairs_are_those_the_usual_package_reads(file: Path) -> None:
    usual = {
        name: field.contents()
        for name, field in gguf.GGUFReader(file).fields.items()
        if not name.startswith("GGUF.")
    }
    assert read_metadata(file) == usual


def test_a_tokenizer_in_a_gguf_file_is_the_one_of_the_model(file: Path, tiny_model: Path) -> None:
    expected = LightTokenizer.from_directory(tiny_model)
    tokenizer: Any = get_tokenizer(file)
    light = _light(file)
    for text in ("hello world 123", "naïve 日本", "<|im_start|>x"):
        assert tokenizer.encode(text) == light.encode(text) == expected.encode(text)
        assert tokenizer.decode(light.encode(text)) == light.decode(light.encode(text)) == text
    assert tokenizer.eos_token_id == light.eos_token_id == expected.eos_token_id
    chat = [{"role": "user", "content": "Hi"}]
    rendered = expected.apply_chat_template(chat, tokenize=False)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == rendered
    assert light.apply_chat_template(chat, tokenize=False) == rendered
    assert get_tokenizer(str(file)) is tokenizer


def _light(file: Path) -> LightTokenizer:
    from tinkex.tokenizers.gguf_tokenizer import build_tokenizer, special_tokens

    metadata = read_metadata(file)
    return LightTokenizer(
        build_tokenizer(metadata),
        special_tokens=special_tokens(metadata),
        chat_template=metadata["tokenizer.chat_template"],
    )


@pytest.mark.parametrize("length", [3, 10, 200])
def test_a_file_that_is_cut_off_is_refused(file: Path, tmp_path: Path, length: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:length])
    with pytest.raises(SetupError, match="cannot be read as a GGUF file"):
        read_metadata(tmp_path / "cut.gguf")


@pytest.mark.parametrize("content", [b"", b"GGML" + b"\0" * 40, b"GGUF" + b"\x09" + b"\0" * 40])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(SetupError, match=r"other\.gguf"):
        read_metadata(tmp_path / "other.gguf")
