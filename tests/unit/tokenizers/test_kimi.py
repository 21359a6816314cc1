"""The tokenizer of the Kimi models: tokens as tiktoken makes them, everything else as usual."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import SetupError
from tinkex.tokenizers import get_tokenizer
from tinkex.tokenizers.kimi import SPLIT_PATTERN, KimiTokenizer

MERGED = ["he", "ll", "llo", "hello", " w", "or", " wor", "ld", " world", "12", "123", "日本", "'s", "  "]
CHAT_TEMPLATE = "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}"


def ranks() -> dict[bytes, int]:
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in MERGED]
    return {token: place for place, token in enumerate(dict.fromkeys(tokens))}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi tokenizer with a small vocabulary, in the files the models come with."""
    home = tmp_path_factory.mktemp("kimi")
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items()]
    (home / "tiktoken.model").write_text("\n".join(lines) + "\n")
    base = len(lines)
    named = {"[BOS]": base, "[EOS]": base + 1, "<|im_end|>": base + 2, "<|im_user|>": base + 3}
    config = {
        "added_tokens_decoder": {str(place): {"content": name} for name, place in named.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    (home / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return home


@pytest.fixture(scope="module")
def kimi(directory: Path) -> KimiTokenizer:
    return KimiTokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def plain() -> tiktoken.Encoding:
    return tiktoken.Encoding("plain", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks(), special_tokens={})


@given(st.text())
def test_any_text_becomes_what_tiktoken_makes_of_it_and_comes_back(
    kimi: KimiTokenizer, plain: tiktoken.Encoding, text: str
) -> None:
    ids = kimi.encode(text, allow_special_tokens=False)
    assert ids == plain.encode(text, disallowed_special=())
    assert kimi.decode(ids) == text


def test_words_are_cut_as_the_models_were_trained() -> None:
    import regex

    pattern = SPLIT_PATTERN.replace("&&[^\\p{Han}]", "--\\p{Han}")  # the same set in another notation
    cut = regex.compile(pattern, regex.V1).findall
    assert cut("Hello world's 日本語abc 12345") == [
        "Hello",
        " world's",
        " ",
        "日本語",
        "abc",
        " ",
        "123",
        "45",
    ]
    assert cut("a  b\n\n c!?\n") == ["a", " ", " b", "\n\n", " c", "!?\n"]


def test_special_tokens_follow_the_trained_ones(kimi: KimiTokenizer) -> None:
    base = len(ranks())
    assert (kimi.bos_token_id, kimi.eos_token_id) == (base, base + 1)
    assert kimi.convert_tokens_to_ids("<|im_end|>") == base + 2
    assert kimi.convert_ids_to_tokens(base + 10) == f"<|reserved_token_{base + 10}|>"
    assert kimi.all_special_ids == list(range(base, base + 256))
    assert len(kimi) == kimi.vocab_size == base + 256


def test_special_tokens_in_a_text_count_unless_set_otherwise(kimi: KimiTokenizer) -> None:
    ids = kimi.encode("hello<|im_end|>")
    assert ids[-1] == kimi.convert_tokens_to_ids("<|im_end|>")
    assert kimi.decode(ids) == "hello<|im_end|>"
    assert kimi.decode(ids, skip_special_tokens=True) == "hello"
    spelled = kimi.encode("hello<|im_end|>", allow_special_tokens=False)
    assert len(spelled) > len(ids)
    assert kimi.encode("hello", add_special_tokens=True) == kimi.encode("hello", add_special_tokens=False)


def test_chats_and_the_everyday_methods_work(kimi: KimiTokenizer) -> None:
    chat = [{"role": "user", "content": "hello world"}]
    text = kimi.apply_chat_template(chat, tokenize=False)
    assert text == "<|im_user|>hello world<|im_end|>"
    assert kimi.apply_chat_template(chat) == kimi.encode(text)
    assert kimi(["hello", "日本"]).input_ids == [kimi.encode("hello"), kimi.encode("日本")]
    vocabulary = kimi.get_vocab()
    assert len(vocabulary) == len(kimi)
    tokens = kimi.tokenize("hello world日本 é")
    assert [vocabulary[token] for token in tokens] == kimi.encode("hello world日本 é")
    assert kimi.convert_tokens_to_ids(tokens) == kimi.encode("hello world日本 é")
    assert kimi.convert_tokens_to_ids("no such token") is None


def test_runs_longer_than_the_pattern_can_see_are_cut(kimi: KimiTokenizer) -> None:
    text = "hello " + " " * 60_000 + "x" * 30_000 + " world"
    assert kimi.decode(kimi.encode(text)) == text


def test_a_directory_with_a_tiktoken_file_gives_it_also_where_transformers_is(directory: Path) -> None:
    tokenizer = get_tokenizer(directory)
    assert isinstance(tokenizer, KimiTokenizer)
    assert get_tokenizer(str(directory)) is tokenizer


@pytest.mark.parametrize("content", ["", "not base64 1", "aGVsbG8= 7", "aGVsbG8="])
def test_a_broken_file_says_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(SetupError, match=r"tiktoken\.model.*download it again"):
        KimiTokenizer.from_directory(tmp_path)


def test_without_tiktoken_the_error_names_the_extra(directory: Path) -> None:
    program = f"""
import sys
sys.modules["tiktoken"] = None  # as if it were not installed
from tinkex.tokenizers import get_tokenizer
try:
    get_tokenizer({str(directory)!r})
except Exception as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "SetupError" in said
    assert "pip install 'tinkex[kimi]'" in said
