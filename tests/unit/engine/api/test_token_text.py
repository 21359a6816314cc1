"""The offsets of tokens in their text."""

from __future__ import annotations

import pytest

from tests.models import tiny_llama
from tinkex.engine.api.compatible.token_text import TextOffsets
from tinkex.engine.model.tokenizer import EngineTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> EngineTokenizer:
    return EngineTokenizer(tiny_llama(tmp_path_factory.mktemp("offsets") / "model"))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_offsets_do_not_depend_on_how_tokens_are_split_over_chunks(
    tokenizer: EngineTokenizer, size: int
) -> None:
    tokens = tokenizer.encode("a€é🙂z")
    assert any(
        len(tokenizer.decode_bytes([token])) < 2 for token in tokens[1:-1]
    )  # characters of several tokens
    whole = TextOffsets(tokenizer, 7).add(tokens)
    parts = TextOffsets(tokenizer, 7)
    joined = [place for at in range(0, len(tokens), size) for place in parts.add(tokens[at : at + size])]
    assert joined == whole
    assert whole[0] == 7
    assert whole[-1] == 7 + 4
