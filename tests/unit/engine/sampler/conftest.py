from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engine.sampler.harness import one_thread
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.sampler import Sampler

__all__ = ["model", "one_thread", "sampler", "tokenizer"]


@pytest.fixture(scope="session")
def model(tiny_model: Path) -> Transformer:
    return load_transformer(tiny_model)


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> EngineTokenizer:
    return EngineTokenizer(tiny_model)


@pytest.fixture
def sampler(model: Transformer, tokenizer: EngineTokenizer) -> Sampler:
    return Sampler(model, tokenizer)
