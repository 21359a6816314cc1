from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.unit.engine.sampler.harness import job
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.job import SampleJob, check_job, max_new_tokens
from tinkex.engine.sampler.sampler import Sampler
from tinkex.errors import InvalidInput
from tinkex.types import EncodedTextChunk, ImageChunk, ModelInput, SampleRequest, SamplingParams, TensorData


def targets(*rows: list[int]) -> TensorData:
    return TensorData.from_numpy(np.array(rows, np.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1] * 513}, "prompt has 513 tokens, and this model's context holds 512"),
        ({"prompt": [1, 512]}, "prompt token 512 at index 1"),
        ({"prompt": [-1]}, "prompt token -1 at index 0"),
        ({"num_samples": 0}, "num_samples must be at least 1, and is 0"),
        ({"temperature": 1e-9}, "temperature must be 0"),
        ({"temperature": 1e300}, "temperature must be 0"),
        ({"stop": [600]}, "token id 600"),
        ({"stop": [""]}, "empty string"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs must lie in 0…512, and is -1"),
        ({"topk_sample_logprobs": 513}, "topk_sample_logprobs must lie in 0…512, and is 513"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k must lie in 0…512, and is -1"),
        ({"prompt_alt_tokens_k": 513}, "prompt_alt_tokens_k must lie in 0…512, and is 513"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n must be at least 1"),
        ({"prompt_logprobs_last_n": 1}, "set prompt_logprobs too"),
        ({"target_prompt_logprobs": targets([1], [2])}, r"shape \[2, K\]|has \[2, 1\]"),
        ({"target_prompt_logprobs": targets([512], [0], [0])}, "token id 512"),
        ({"target_prompt_logprobs": targets([-2], [0], [0])}, "token id -2"),
        ({"target_prompt_logprobs": TensorData([1, 2, 3], "int64", None)}, "has None"),
        ({"target_prompt_logprobs": TensorData([1, 2, 3], "float32", [3, 1])}, "must contain int64"),
    ],
)
def test_what_cannot_be_sampled_is_rejected_and_named(
    sampler: Sampler, change: dict[str, Any], message: str
) -> None:
    options = {"prompt": [1, 5, 9, 11], **change}
    with pytest.raises(InvalidInput, match=message):
        sampler.check(job(options.pop("prompt"), **options))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_settings_that_slipped_past_their_type_are_rejected_too(
    sampler: Sampler, field: str, value: float
) -> None:
    params = SamplingParams()
    msgspec.structs.force_setattr(params, field, value)
    with pytest.raises(InvalidInput, match=field):
        sampler.check(with_params(job([1]), params))


def with_params(base: SampleJob, params: SamplingParams) -> SampleJob:
    return SampleJob(base.request_id, None, base.prompt_P, 1, params, base.sequence_ids)


def test_a_rejected_job_leaves_the_sampler_as_it_was(sampler: Sampler) -> None:
    with pytest.raises(InvalidInput):
        sampler.add(job([]))
    assert not sampler.busy


def test_alternatives_are_bounded_over_the_whole_prompt(model: Transformer) -> None:
    wide = replace(model.arch, vocab_size=5000, max_context=5000)
    fits = job([1] * 2048, prompt_alt_tokens_k=1024)
    check_job(fits, wide, [2])
    with pytest.raises(InvalidInput, match="at most 2097152 are drawn"):
        check_job(job([1] * 2049, prompt_alt_tokens_k=1024), wide, [2])


def test_tables_of_top_k_tokens_are_bounded_over_a_whole_request(model: Transformer) -> None:
    wide = replace(model.arch, vocab_size=5000, max_context=40_000)
    check_job(job([1] * 32_768, topk_prompt_logprobs=1024, max_tokens=1), wide, [2])
    with pytest.raises(InvalidInput, match=r"topk_prompt_logprobs is 1024 .* at most 33554432"):
        check_job(job([1] * 32_769, topk_prompt_logprobs=1024, max_tokens=1), wide, [2])

    check_job(job([1], num_samples=8, topk_sample_logprobs=1024, max_tokens=4096), wide, [2])
    with pytest.raises(InvalidInput, match=r"topk_sample_logprobs is 1024 .* at most 33554432"):
        check_job(job([1], num_samples=8, topk_sample_logprobs=1024, max_tokens=4097), wide, [2])
    with pytest.raises(InvalidInput, match=r"topk_sample_logprobs is 1024 .* at most 33554432"):
        check_job(job([1], topk_sample_logprobs=1024), wide, [2])  # up to the end of the context
    check_job(job([1], num_samples=8, topk_sample_logprobs=100), wide, [2])


def test_sequence_ids_must_be_as_many_as_samples(sampler: Sampler) -> None:
    wrong = SampleJob("r", None, np.array([1], np.int32), 2, SamplingParams(), ["only-one"])
    with pytest.raises(InvalidInput, match="1 sequence ids"):
        sampler.check(wrong)


def test_a_job_is_read_from_a_request(sampler: Sampler) -> None:
    request = SampleRequest(
        prompt=ModelInput(chunks=[EncodedTextChunk(tokens=[4]), EncodedTextChunk(tokens=[5, 6])]),
        sampling_params=SamplingParams(max_tokens=3),
        num_samples=2,
        prompt_logprobs=True,
        prompt_logprobs_last_n=1,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
    )
    read = SampleJob.of(request, request_id="r", adapter=None, sequence_ids=["a", "b"])
    sampler.check(read)
    assert read.prompt_P.tolist() == [4, 5, 6]
    assert (read.prompt_logprobs, read.prompt_logprobs_last_n) == (True, 1)
    assert (read.topk_prompt_logprobs, read.topk_sample_logprobs) == (2, 3)


def test_a_prompt_that_is_not_text_is_rejected_by_the_kind_of_its_chunks() -> None:
    picture = ImageChunk(data=b"x", format="png", expected_tokens=3)
    request = SampleRequest(prompt=ModelInput(chunks=[picture]), sampling_params=SamplingParams())
    with pytest.raises(InvalidInput, match="image chunks"):
        SampleJob.of(request, request_id="r", adapter=None, sequence_ids=["a"])


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "expected"),
    [(10, 5, 5), (10, None, 90), (95, 50, 5), (99, None, 1), (100, None, 1), (100, 7, 1)],
)
def test_a_sequence_may_grow_to_max_tokens_or_to_the_context(
    prompt_length: int, max_tokens: int | None, expected: int
) -> None:
    assert max_new_tokens(prompt_length, max_tokens, max_context=100) == expected
