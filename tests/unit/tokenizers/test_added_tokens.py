"""Tokens stated beside ``tokenizer.json`` are those that ``transformers`` finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_tokenizer
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.errors import SetupError
from tinkex.tokenizers.light import LightTokenizer

TEXTS = ["hi <|new|> there", "a<|tool|>b <|im_end|>", "the sea <unk> the sky", "  <|new|>\n<|tool|>"]
NEW: dict[str, Any] = {"content": "<|new|>", "special": True, "normalized": False}
TOOL: dict[str, Any] = {"content": "<|tool|>", "special": False, "rstrip": True, "normalized": False}
FIRST_FREE = 437
"""The first id that the tokenizer of these tests leaves free."""

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "listed in the config": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(FIRST_FREE + 1): TOOL, str(FIRST_FREE): NEW},
        }
    },
    "the end of text is new": {
        "tokenizer_config.json": {"added_tokens_decoder": {str(FIRST_FREE): NEW}, "eos_token": "<|new|>"}
    },
    "listed in a file of their own": {
        "added_tokens.json": {"<|tool|>": FIRST_FREE + 1, "<|new|>": FIRST_FREE},
    },
    "named only": {"tokenizer_config.json": {"unk_token": "<unk>", "pad_token": {"content": "<|new|>"}}},
    "named in the map": {"special_tokens_map.json": {"cls_token": "<|tool|>"}},
    "further special ones": {"tokenizer_config.json": {"additional_special_tokens": ["<|tool|>", "<|new|>"]}},
    "an ordinary token that is named": {"tokenizer_config.json": {"sep_token": "the"}},
}


def _write(directory: Path, files: dict[str, dict[str, Any]]) -> Path:
    tiny_tokenizer(directory)
    for name, fields in files.items():
        path = directory / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | fields))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_texts_become_the_same_tokens(tmp_path: Path, case: str) -> None:
    from transformers import AutoTokenizer

    directory = _write(tmp_path, CASES[case])
    usual, light, engines = (
        AutoTokenizer.from_pretrained(directory),
        LightTokenizer.from_directory(directory),
        EngineTokenizer(directory),
    )
    for text in TEXTS:
        expected = usual.encode(text)
        assert light.encode(text) == expected
        assert engines.encode(text) == expected
        assert engines.decode(expected) == usual.decode(expected) == light.decode(expected)
    assert len(light) == engines.vocab_size == len(usual)
    assert usual.eos_token_id in engines.eos_token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "older"),
    [
        ({}, {"eos_token": "<|endoftext|>"}),
        ({}, {"eos_token": None}),
        ({"eos_token": None}, {"eos_token": {"content": "<|endoftext|>"}}),
        ({"added_tokens_decoder": {str(FIRST_FREE): NEW}}, {"eos_token": "<|endoftext|>"}),
        ({"added_tokens_decoder": {str(FIRST_FREE): NEW}, "eos_token": None}, {"eos_token": "<|im_end|>"}),
    ],
)
def test_of_two_files_that_differ_the_same_one_is_believed(
    tmp_path: Path, config: dict[str, Any], older: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    directory = _write(tmp_path, {"tokenizer_config.json": config, "special_tokens_map.json": older})
    expected = AutoTokenizer.from_pretrained(directory).eos_token
    assert LightTokenizer.from_directory(directory).eos_token == expected
    assert EngineTokenizer(directory).special_tokens.get("eos_token") == expected


def test_a_token_that_was_added_later_has_its_text_as_bytes(tmp_path: Path) -> None:
    engines = EngineTokenizer(_write(tmp_path, CASES["listed in the config"]))
    assert engines.decode_bytes(engines.encode("é<|tool|>ü")) == "é<|tool|>ü".encode()


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ({"9000": NEW}, r"'<\|new\|>' the id 9000, but with tokenizer\.json it is 437"),
        ({"437": {"special": True}}, "as a token"),
        ({"many": NEW}, "the id 'many'"),
    ],
)
@pytest.mark.parametrize("reader", [EngineTokenizer, LightTokenizer.from_directory])
def test_a_list_that_cannot_be_followed_is_rejected(
    tmp_path: Path, listed: dict[str, Any], words: str, reader: Any
) -> None:
    directory = _write(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": listed}})
    with pytest.raises(SetupError, match=words):
        reader(directory)


@pytest.mark.parametrize("reader", [EngineTokenizer, LightTokenizer.from_directory])
def test_a_file_that_is_nested_too_deeply_is_rejected(tmp_path: Path, reader: Any) -> None:
    directory = _write(tmp_path, {})
    (directory / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(SetupError, match=r"tokenizer_config\.json cannot be read as JSON"):
        reader(directory)
