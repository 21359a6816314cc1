from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import tiny_llama, tiny_tokenizer
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.errors import InvalidInput, SetupError

TEXTS = [
    "",
    "Hello, world",
    "Digits 12345 and π≈3.14159",
    "漢字 🙂\n\n\tend",
    "<|im_start|>user\nhi<|im_end|>",
    " a  b ",
]
CHAT = [{"role": "user", "content": "What is two plus two?"}, {"role": "assistant", "content": "Four."}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tokenizer") / "model")


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> EngineTokenizer:
    return EngineTokenizer(directory)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_those_of_transformers(directory: Path, tokenizer: EngineTokenizer, text: str) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer: EngineTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode_bytes(tokens) == text.encode()
    assert b"".join(tokenizer.decode_bytes([token]) for token in tokens) == text.encode()


def test_a_character_split_between_tokens_keeps_its_bytes(tokenizer: EngineTokenizer) -> None:
    tokens = tokenizer.encode("🙂")
    assert len(tokens) > 1
    assert tokenizer.decode_bytes(tokens[:1]) == "🙂".encode()[:1]
    assert "�" in tokenizer.decode(tokens[:1])


def test_ids_without_an_entry_have_no_bytes(tokenizer: EngineTokenizer) -> None:
    assert tokenizer.decode_bytes([10**6, -1]) == b""


def test_every_end_token_is_known(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    assert EngineTokenizer(directory).eos_token_ids == (2,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert EngineTokenizer(directory).eos_token_ids == (0, 2)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert EngineTokenizer(directory).eos_token_ids == (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_renders_as_in_transformers(
    directory: Path, tokenizer: EngineTokenizer, add_generation_prompt: bool
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(directory)
    expected = reference.apply_chat_template(
        CHAT, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert tokenizer.render_chat_template(CHAT, add_generation_prompt=add_generation_prompt) == expected
    tokens = tokenizer.apply_chat_template(CHAT, add_generation_prompt=add_generation_prompt)
    assert tokens == reference.encode(expected, add_special_tokens=False)


def test_a_template_file_comes_before_the_config_entry(tmp_path: Path) -> None:
    directory = tiny_tokenizer(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert EngineTokenizer(directory).render_chat_template(CHAT) == "<|im_start|>What is two plus two?"


def test_the_default_of_several_named_templates_is_used(tmp_path: Path) -> None:
    directory = tiny_tokenizer(tmp_path)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert EngineTokenizer(directory).render_chat_template(CHAT) == "yes"


def test_messages_without_a_template_are_rejected(tmp_path: Path) -> None:
    directory = tiny_tokenizer(tmp_path)
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidInput, match="no chat template"):
        EngineTokenizer(directory).apply_chat_template(CHAT)


def test_sentencepiece_tokens_have_their_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    vocab = {"▁the": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "é": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert EngineTokenizer(tmp_path).decode_bytes([0, 1, 2, 3, 4]) == " the€é".encode()


def test_a_directory_without_a_tokenizer_is_a_setup_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no tokenizer\.json"):
        EngineTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SetupError, match="cannot be read as a tokenizer"):
        EngineTokenizer(tmp_path)
