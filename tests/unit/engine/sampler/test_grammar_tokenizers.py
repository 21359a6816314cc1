"""Structured output with every kind of tokenizer: byte-level and SentencePiece, from directories and from GGUF files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_llama
from tests.unit.engine.model.test_gguf import write_gguf
from tests.unit.engine.model.test_gguf_sentencepiece import metadata
from tests.unit.engine.sampler.harness import sample
from tinkex.engine.model.gguf import convert_gguf
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.sampler.sampler import Sampler
from tinkex.testing.tiny_model import write_tiny_model
from tinkex.types import StructuredOutput

pytestmark = pytest.mark.slow

SOURCES: dict[str, dict[str, Any]] = {
    "byte-level GGUF": {},
    "SentencePiece GGUF": {"tokenizer_model": "llama", "pieces": metadata()},
}


@pytest.fixture(scope="module", params=["directory", *SOURCES])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    if request.param == "directory":
        return write_tiny_model(place / "tiny")
    original = tiny_llama(place / "original", tie=False)
    convert_gguf(write_gguf(original, place / "model.gguf", **SOURCES[request.param]), place / "converted")
    return place / "converted"


def test_the_decoded_text_matches_the_grammar(directory: Path) -> None:
    tokenizer = EngineTokenizer(directory)
    sampler = Sampler(load_transformer(directory), tokenizer)
    words = "[a-c]{1,9}( [a-c]{1,5}){2}"
    schema = {"type": "array", "items": {"enum": ["é", "the", 1]}, "minItems": 2, "maxItems": 4}
    for seed in range(5):
        texts = []
        for wanted in (StructuredOutput(regex=words), StructuredOutput(json_schema=schema)):
            [sequence] = sample(
                sampler, [5, 6, 7], max_tokens=200, seed=seed, structured_output=wanted
            ).sequences
            assert sequence.stop_reason == "stop"
            texts.append(tokenizer.decode(sequence.tokens, skip_special_tokens=True))
        assert re.fullmatch(words, texts[0])
        assert 2 <= len(json.loads(texts[1])) <= 4
