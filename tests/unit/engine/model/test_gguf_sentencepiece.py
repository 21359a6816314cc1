"""SentencePiece tokenizers out of GGUF metadata, against the algorithm written down plainly."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.errors import SetupError
from tinkex.tokenizers.gguf_tokenizer import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Merged pieces first, the best of them at the beginning, then single characters, as such vocabularies are laid out.
MERGED = [
    "▁t",
    "he",
    "▁the",
    "in",
    "▁a",
    "er",
    "re",
    "▁there",
    "ing",
    "▁in",
    "▁▁",
    "ab",
    "bc",
    "abc",
    "é▁",
    "ere",
]
SINGLE = [*"▁abcdefghinrstué.,!漢"]
PIECES = MERGED + SINGLE
TOKENS = [*SPECIAL, *BYTES, *PIECES, "<tool>"]


def metadata(**changes: Any) -> dict[str, Any]:
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]
    scores = [0.0] * (3 + 256) + [-float(rank) for rank in range(len(PIECES))] + [0.0]
    stated = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**stated, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}


def plainly(text: str, *, prefix: bool = True) -> list[int]:
    """Join the neighbours that make the best piece, the leftmost of equals, until none do; bytes for the rest."""
    symbols = [*(("▁" if prefix else "") + text.replace(" ", "▁"))]
    while True:
        pairs = [
            (PIECES.index(left + right), place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if left + right in PIECES
        ]
        if not pairs:
            break
        _, place = min(pairs)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [TOKENS.index(symbol)] if symbol in PIECES else [3 + byte for byte in symbol.encode()]
    return ids


@given(st.text(alphabet=st.sampled_from([*"abcdehinrtéx漢字🙂 .\n"]), min_size=1, max_size=40))
def test_pieces_are_joined_by_their_scores(text: str) -> None:
    tokenizer = build_tokenizer(metadata())
    assert tokenizer.encode(text, add_special_tokens=False).ids == plainly(text)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("text", ["the abc in there", "a  bc", " leading", "é é", "漢字 🙂", "abcabc"])
def test_words_with_and_without_a_leading_space(text: str) -> None:
    plain = build_tokenizer(metadata(add_space_prefix=False))
    assert plain.encode(text, add_special_tokens=False).ids == plainly(text, prefix=False)
    assert plain.decode(plain.encode(text).ids) == text


def test_a_text_begins_with_the_beginning_token_unless_the_file_says_otherwise() -> None:
    assert build_tokenizer(metadata()).encode("the").ids[0] == 1
    assert build_tokenizer(metadata(add_bos_token=False)).encode("the").ids == plainly("the")


def test_a_text_ends_with_the_end_token_where_the_file_says_so() -> None:
    both = build_tokenizer(metadata(add_eos_token=True))
    assert both.encode("the").ids == [1, *plainly("the"), 2]
    assert both.encode("the", "abc").ids == [1, *plainly("the"), 2, 1, *plainly("abc"), 2]
    only_end = build_tokenizer(metadata(add_eos_token=True, add_bos_token=False))
    assert only_end.encode("the").ids == [*plainly("the"), 2]
    assert only_end.encode("the", add_special_tokens=False).ids == plainly("the")


def test_special_tokens_are_found_in_a_text() -> None:
    ids = build_tokenizer(metadata()).encode("the</s>abc<tool>", add_special_tokens=False).ids
    assert ids == [*plainly("the"), 2, *plainly("abc"), TOKENS.index("<tool>")]


@pytest.mark.slow
def test_the_saved_tokenizer_has_the_bytes_of_every_token_and_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    built = build_tokenizer(metadata())
    built.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = EngineTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "the 漢字 🙂 abc"
    assert ours.encode(text) == theirs.encode(text) == built.encode(text).ids
    assert ours.decode_bytes(ours.encode(text, add_special_tokens=False)) == f" {text}".encode()
    assert ours.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, "tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores"),
        ({"unknown_token_id": None}, "unknown token"),
        ({"tokens": None}, "has no tokenizer"),
        ({"model": "bert"}, "'bert'"),
        ({"model": "t5"}, "'t5'"),
    ],
)
def test_what_cannot_be_rebuilt_is_rejected_and_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        build_tokenizer(metadata(**changes))


def test_merges_that_do_not_fit_the_vocabulary_are_a_setup_error() -> None:
    broken = {"model": "gpt2", "merges": ["a b", "x y"], "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1]}
    with pytest.raises(SetupError, match="is inconsistent"):
        build_tokenizer(metadata(**broken))


def test_a_vocabulary_without_bytes_is_rejected() -> None:
    tokens = [token for token in TOKENS if token != "<0x0A>"]
    with pytest.raises(SetupError, match="byte tokens"):
        build_tokenizer(
            metadata(tokens=tokens, scores=[0.0] * len(tokens), token_type=[NORMAL] * len(tokens))
        )
