"""Structured output and sampling options through the client, on the embedded engine and on a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import jsonschema
import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL, Backend
from tinkex import types

pytestmark = [pytest.mark.slow, pytest.mark.backends(*WITH_A_MODEL)]

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.fixture
def sampler(backend: Backend) -> Iterator[tinkex.SamplingClient]:
    with backend.service() as service:
        yield service.create_sampling_client(base_model=BASE_MODEL)


def constrained(seed: int = 0, **wanted: object) -> types.SamplingParams:
    output = types.StructuredOutput.model_validate(wanted)
    return types.SamplingParams(max_tokens=120, seed=seed, structured_output=output)


def text(sampler: tinkex.SamplingClient, sequence: types.SampledSequence) -> str:
    assert sequence.stop_reason == "stop"
    return sampler.get_tokenizer().decode(sequence.tokens, skip_special_tokens=True)


def test_constrained_samples_match_their_grammar_beside_free_ones(sampler: tinkex.SamplingClient) -> None:
    objects = sampler.sample(PROMPT, 3, constrained(json_schema=PERSON))
    free = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=30, seed=1, stop=[]))
    matches = sampler.sample(PROMPT, 2, constrained(regex="[ab]{3,9}c"))
    sums = sampler.sample(PROMPT, 2, constrained(grammar='start: /[0-9]/ ("+" /[0-9]/)~0..5'))
    for sequence in objects.result(60).sequences:
        jsonschema.validate(json.loads(text(sampler, sequence)), PERSON)
    for sequence in matches.result(60).sequences:
        assert re.fullmatch("[ab]{3,9}c", text(sampler, sequence))
    for sequence in sums.result(60).sequences:
        assert re.fullmatch(r"[0-9](\+[0-9]){0,5}", text(sampler, sequence))
    assert [len(sequence.tokens) for sequence in free.result(60).sequences] == [30, 30]


def test_a_stream_equals_the_sample_with_the_same_seed(sampler: tinkex.SamplingClient) -> None:
    params = constrained(3, json_schema=PERSON)
    [whole] = sampler.sample(PROMPT, 1, params).result(60).sequences
    events = list(sampler.sample_stream(PROMPT, 1, params))
    tokens = [event for event in events if isinstance(event, types.SampledToken)]
    assert [event.token for event in tokens] == whole.tokens
    assert "".join(event.text or "" for event in tokens) == text(sampler, whole)
    assert isinstance(events[-1], types.SampleStreamDone)
    assert events[-1].stop_reasons == ["stop"]


def test_what_cannot_be_honoured_is_a_bad_request_that_names_it(sampler: tinkex.SamplingClient) -> None:
    for wanted, named in (
        ({"json_schema": {"uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"maxLenght": 3}}, "maxLenght"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: missing"}, "missing"),
    ):
        with pytest.raises(tinkex.BadRequestError, match=named):
            sampler.sample(PROMPT, 1, constrained(**wanted)).result(60)
        with pytest.raises(tinkex.BadRequestError, match=named):
            list(sampler.sample_stream(PROMPT, 1, constrained(**wanted)))


def test_options_have_their_effect(sampler: tinkex.SamplingClient) -> None:
    def tokens(**options: object) -> list[int]:
        params = types.SamplingParams.model_validate({"max_tokens": 12, "seed": 1, "stop": [], **options})
        return sampler.sample(PROMPT, 1, params).result(60).sequences[0].tokens

    greedy = tokens(temperature=0)
    assert tokens(min_p=1.0) == greedy
    assert tokens(logit_bias={9: 100.0}) == [9] * 12
    assert len(set(tokens(temperature=0, frequency_penalty=2.0))) >= len(set(greedy))
    assert not set(tokens(temperature=0, repetition_penalty=100.0)) & {5, 6, 7}
