"""Structured output of the default model: its vocabulary, special tokens and real text."""

from __future__ import annotations

import json

import pytest

from tests.unit.engine.sampler.harness import finish, job
from tinkex.engine.config import EngineConfig
from tinkex.engine.model.catalog import DEFAULT_MODEL, LoadedModel, load_model
from tinkex.engine.sampler.sampler import Sampler
from tinkex.types import StructuredOutput

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(DEFAULT_MODEL, EngineConfig().models_home)


@pytest.fixture(scope="module")
def sampler(loaded: LoadedModel) -> Sampler:
    return Sampler(loaded.transformer, loaded.tokenizer)


def chat(loaded: LoadedModel, text: str) -> list[int]:
    return loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def test_a_question_is_answered_in_the_required_form_beside_free_text(
    loaded: LoadedModel, sampler: Sampler
) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Peru"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    prompt = chat(loaded, "What is the capital of France? Answer with a city and its country, as JSON.")
    asked = job(prompt, max_tokens=80, temperature=0, structured_output=StructuredOutput(json_schema=schema))
    free = job(prompt, max_tokens=40, temperature=0)
    choice = job(prompt, max_tokens=8, temperature=0, structured_output=StructuredOutput(regex="Paris|Lima"))
    results = finish(sampler, [asked, free, choice])
    answer = loaded.tokenizer.decode(results[asked.request_id].sequences[0].tokens, skip_special_tokens=True)
    assert json.loads(answer)["country"] == "France"
    city = loaded.tokenizer.decode(results[choice.request_id].sequences[0].tokens, skip_special_tokens=True)
    assert city == "Paris"
    alone = finish(Sampler(loaded.transformer, loaded.tokenizer), [free])
    assert results[free.request_id].sequences[0].tokens == alone[free.request_id].sequences[0].tokens
