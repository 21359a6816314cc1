"""Constrained sequences: their text is what was asked for, in any batch, and the rest of the sampler is as before."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.schemas import schemas
from tests.unit.engine.kernels.cores import CORES
from tests.unit.engine.sampler.harness import finish, full_logits, job, random_tokens, sample
from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.grammar import GrammarCompiler
from tinkex.engine.sampler.kv_cache import bytes_per_token
from tinkex.engine.sampler.sampler import Sampler
from tinkex.errors import InvalidInput
from tinkex.types import SampledSequence, StructuredOutput

pytestmark = pytest.mark.slow

WAYS = ["torch", *(["compiled"] if CORES else [])]
EXAMPLES = int(os.environ.get("TINKEX_SCHEMA_EXAMPLES", 5 * settings.default.max_examples))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OUTPUTS: dict[str, StructuredOutput] = {
    "schema": StructuredOutput(json_schema=PERSON),
    "regex": StructuredOutput(regex="(red|green|blue)(, (red|green|blue)){2,6}"),
    "grammar": StructuredOutput(grammar='start: item ("+" item)*\nitem: /[0-9]{1,3}/ | "(" item ")"'),
}


def text_of(sequence: SampledSequence, tokenizer: EngineTokenizer) -> str:
    """The text of a sequence that ended, without its end-of-sequence token; it must be UTF-8."""
    assert sequence.stop_reason == "stop"
    assert sequence.tokens[-1] in tokenizer.eos_token_ids
    return tokenizer.decode_bytes(sequence.tokens[:-1]).decode()


@pytest.mark.slow
def test_random_schemas_give_valid_json(model: Transformer, tokenizer: EngineTokenizer) -> None:
    sampler = Sampler(model, tokenizer)
    ends: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(schemas())
    def ends_with_a_valid_value(schema: dict[str, Any]) -> None:
        number = sum(ends.values())
        [sequence] = sample(
            sampler,
            random_tokens(6, number),
            max_tokens=480,
            seed=number,
            structured_output=StructuredOutput(json_schema=schema),
        ).sequences
        ends[sequence.stop_reason] += 1
        if sequence.stop_reason == "stop":
            value = json.loads(text_of(sequence, tokenizer))
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)

    ends_with_a_valid_value()
    print(f"{EXAMPLES} schemas: {dict(ends)}")
    assert ends["stop"] >= 0.95 * sum(ends.values()), ends


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("name", OUTPUTS)
def test_every_sample_matches_its_request(
    sampler: Sampler, tokenizer: EngineTokenizer, name: str, temperature: float
) -> None:
    response = sample(
        sampler,
        random_tokens(5, 1),
        num_samples=8,
        max_tokens=300,
        seed=1,
        temperature=temperature,
        structured_output=OUTPUTS[name],
        repetition_penalty=1.05,  # a greedy model would repeat one digit or word for ever
    )
    texts = [text_of(s, tokenizer) for s in response.sequences if s.stop_reason == "stop"]
    assert len(texts) >= 7
    assert len(set(texts)) > 1 or temperature == 0
    for text in texts:
        if name == "schema":
            jsonschema.validate(json.loads(text), PERSON)
        elif name == "regex":
            assert re.fullmatch(OUTPUTS[name].regex or "", text)
        else:
            assert re.fullmatch(r"\(*[0-9]{1,3}\)*(\+\(*[0-9]{1,3}\)*)*", text)
            assert text.count("(") == text.count(")")


def test_a_sequence_without_room_ends_with_length(sampler: Sampler) -> None:
    [cut] = sample(sampler, random_tokens(5, 1), max_tokens=3, structured_output=OUTPUTS["schema"]).sequences
    assert (cut.stop_reason, len(cut.tokens)) == ("length", 3)


@pytest.mark.parametrize("stop", [None, [], ["never"], [7]])
def test_a_complete_text_ends_the_sequence_whatever_stop_says(
    sampler: Sampler, tokenizer: EngineTokenizer, stop: Any
) -> None:
    [ended] = sample(
        sampler, random_tokens(5, 1), max_tokens=50, stop=stop, structured_output=StructuredOutput(regex="ab")
    ).sequences
    assert text_of(ended, tokenizer) == "ab"


def test_a_stop_string_ends_the_text_earlier(sampler: Sampler, tokenizer: EngineTokenizer) -> None:
    [cut] = sample(
        sampler,
        random_tokens(5, 1),
        max_tokens=50,
        stop="cc",
        structured_output=StructuredOutput(regex="c{9}"),
    ).sequences
    assert (cut.stop_reason, tokenizer.decode(cut.tokens)) == ("stop", "cc")


@pytest.mark.parametrize("compute", WAYS)
def test_logprobs_are_those_of_the_masked_distribution(
    model: Transformer, tokenizer: EngineTokenizer, compute: str
) -> None:
    prompt, temperature = random_tokens(6, 3), 0.8
    wanted = StructuredOutput(regex="[abc]{2}d[xy]")
    [sequence] = sample(
        Sampler(model, tokenizer, compute=compute),
        prompt,
        max_tokens=20,
        seed=2,
        temperature=temperature,
        topk_sample_logprobs=4,
        structured_output=wanted,
    ).sequences
    logits = full_logits(model, prompt + sequence.tokens).double()
    state = GrammarCompiler(tokenizer, model.arch.vocab_size).start(wanted)
    assert sequence.logprobs is not None
    assert sequence.topk_logprobs is not None
    for step, token in enumerate(sequence.tokens):
        allowed = np.flatnonzero(state.allowed()).tolist()
        state.advance(token)
        expected = torch.log_softmax(logits[len(prompt) - 1 + step][allowed] / temperature, -1).tolist()
        scores = dict(zip(allowed, expected, strict=True))
        assert sequence.logprobs[step] == pytest.approx(scores[token], abs=1e-4)
        top = sequence.topk_logprobs[step]
        assert top is not None
        assert len(top) == min(4, len(allowed))
        assert all(value == pytest.approx(scores[other], abs=1e-4) for other, value in top)
    assert sequence.logprobs[-1] == pytest.approx(0.0)  # only the end of the sequence was left


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("compute", WAYS)
def test_truncation_applies_to_what_the_grammar_leaves(
    model: Transformer, tokenizer: EngineTokenizer, compute: str, options: dict[str, Any]
) -> None:
    sampler = Sampler(model, tokenizer, compute=compute)
    for seed in range(10):
        [sequence] = sample(
            sampler,
            random_tokens(6, 3),
            max_tokens=60,
            seed=seed,
            structured_output=StructuredOutput(regex="[0-9]{4}-[0-9]{2}"),
            **options,
        ).sequences
        assert re.fullmatch("[0-9]{4}-[0-9]{2}", text_of(sequence, tokenizer))


def mixed_jobs() -> list[Any]:
    return [
        job(
            random_tokens(20 + 7 * n, n),
            num_samples=1 + n % 3,
            max_tokens=90,
            seed=n,
            structured_output=[None, *OUTPUTS.values()][n % 4],
        )
        for n in range(8)
    ]


def outputs(results: dict[str, Any], jobs: list[Any]) -> list[Any]:
    return [[(s.tokens, s.logprobs) for s in results[each.request_id].sequences] for each in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("compute", WAYS)
def test_constrained_and_free_sequences_share_a_batch(
    model: Transformer, tokenizer: EngineTokenizer, compute: str
) -> None:
    jobs = mixed_jobs()
    together = finish(Sampler(model, tokenizer, compute=compute), jobs)
    for each in jobs:
        alone = finish(Sampler(model, tokenizer, compute=compute), [each])
        for one, other in zip(
            together[each.request_id].sequences, alone[each.request_id].sequences, strict=True
        ):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.slow
def test_preempted_sequences_resume_in_their_grammar(model: Transformer, tokenizer: EngineTokenizer) -> None:
    jobs = mixed_jobs()
    per_token = bytes_per_token(model.arch, model.dtype)
    crowded = Sampler(model, tokenizer, kv_budget_bytes=400 * per_token, prompt_cache_bytes=0)
    calm = Sampler(model, tokenizer)
    assert outputs(finish(crowded, jobs), jobs) == outputs(finish(calm, jobs), jobs)
    assert crowded.num_preemptions > 0 == calm.num_preemptions


def test_a_cached_prompt_gives_the_same_constrained_sample(sampler: Sampler) -> None:
    prompt = random_tokens(100, 9)
    first, again = (
        sample(sampler, prompt, max_tokens=60, seed=5, structured_output=OUTPUTS["schema"]) for _ in range(2)
    )
    assert again.prompt_cache_hit_tokens > first.prompt_cache_hit_tokens == 0
    assert first.sequences[0].tokens == again.sequences[0].tokens


def test_tokens_are_reported_as_they_are_drawn(sampler: Sampler) -> None:
    watched = job(random_tokens(6, 1), max_tokens=60, seed=1, structured_output=OUTPUTS["regex"])
    sampler.add(watched)
    lengths: list[int] = []
    sampler.watch(watched.request_id, lambda continuation: lengths.append(len(continuation.tokens)))
    [sequence] = finish(sampler)[watched.request_id].sequences
    assert lengths == list(range(len(sequence.tokens) + 1))


def test_a_grammar_that_becomes_too_complex_fails_alone(sampler: Sampler) -> None:
    hostile = job(
        random_tokens(6, 1),
        max_tokens=60,
        seed=1,
        structured_output=StructuredOutput(regex="(\\p{L}|\\p{N}|\\p{P})*" * 200),
    )
    free = job(random_tokens(6, 1), max_tokens=30, seed=1, stop=[])
    results = finish(sampler, [hostile, free])
    assert isinstance(results[hostile.request_id], InvalidInput)
    assert "structured_output" in str(results[hostile.request_id])
    assert len(results[free.request_id].sequences[0].tokens) == 30


def test_an_invalid_grammar_is_rejected_when_it_is_added(sampler: Sampler) -> None:
    with pytest.raises(InvalidInput, match="unclosed"):
        sampler.add(job([5], structured_output=StructuredOutput(regex="(a")))
    assert not sampler.busy
