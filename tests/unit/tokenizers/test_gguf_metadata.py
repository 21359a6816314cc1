"""The beginning of a GGUF file, read as the usual package reads it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkex.errors import SetupError
from tinkex.tokenizers import get_tokenizer
from tinkex.tokenizers.gguf_metadata import read_metadata
from tinkex.tokenizers.gguf_tokenizer import build_tokenizer, special_tokens
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


@pytest.mark.slow
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
    metadata = read_metadata(file)
    return LightTokenizer(
        build_tokenizer(metadata),
        special_tokens=special_tokens(metadata),
        chat_template=metadata["tokenizer.chat_template"],
    )


@pytest.mark.parametrize("length", [3, 10, 200])
def test_a_file_that_is_cut_off_is_rejected(file: Path, tmp_path: Path, length: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:length])
    with pytest.raises(SetupError, match="cannot be read as a GGUF file"):
        read_metadata(tmp_path / "cut.gguf")


@pytest.mark.parametrize("content", [b"", b"GGML" + b"\0" * 40, b"GGUF" + b"\x09" + b"\0" * 40])
def test_a_file_of_another_kind_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(SetupError, match=r"other\.gguf"):
        read_metadata(tmp_path / "other.gguf")


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
ARRAY, INT32 = 9, 5


def test_arrays_in_arrays_without_end_are_rejected(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", ARRAY, 1) * 5000
    (tmp_path / "deep.gguf").write_bytes(HEADER + struct.pack("<I", ARRAY) + nested)
    with pytest.raises(SetupError, match="cannot be read as a GGUF file"):
        read_metadata(tmp_path / "deep.gguf")


@given(
    st.lists(
        st.one_of(
            st.integers(0, 14).map(lambda kind: struct.pack("<I", kind)),
            st.sampled_from([0, 1, 2, 7, 2**26, 2**27, 2**63, 2**64 - 1]).map(lambda n: struct.pack("<Q", n)),
            st.binary(max_size=9),
        ),
        max_size=12,
    ),
    st.sampled_from([1, 2, 2**64 - 1]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_read_or_rejected(tmp_path: Path, parts: list[bytes], count: int) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, count) + struct.pack("<Q", 1) + b"k"
    (tmp_path / "any.gguf").write_bytes(header + b"".join(parts))
    rejection = ""
    try:
        assert isinstance(read_metadata(tmp_path / "any.gguf"), dict)
    except SetupError as error:
        rejection = str(error)
    assert not rejection or "any.gguf cannot be read as a GGUF file" in rejection


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.just(2**63),
    st.floats(),
    st.text(max_size=3),
    st.lists(
        st.one_of(st.integers(-2, 6), st.text(max_size=2), st.none(), st.lists(st.integers())), max_size=4
    ),
)
KEYS = (
    *("model", "pre", "tokens", "token_type", "merges", "scores", "add_bos_token", "add_eos_token"),
    *("add_space_prefix", "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id"),
)


@given(st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tokenizer_of_odd_values_is_built_or_rejected(file: Path, odd: dict[str, Any]) -> None:
    metadata = read_metadata(file) | {f"tokenizer.ggml.{key}": value for key, value in odd.items()}
    rejection = ""
    try:
        build_tokenizer(metadata)
        assert all(isinstance(token, str) for token in special_tokens(metadata).values())
    except SetupError as error:
        rejection = str(error)
    assert not rejection or "GGUF" in rejection


@pytest.mark.parametrize("number", [-1, 10**6, "1", 1.5])
def test_a_special_token_that_is_not_in_the_vocabulary_is_rejected(file: Path, number: Any) -> None:
    metadata = read_metadata(file) | {"tokenizer.ggml.eos_token_id": number}
    with pytest.raises(SetupError, match=r"eos_token is number .* of \d+ tokens"):
        build_tokenizer(metadata)
