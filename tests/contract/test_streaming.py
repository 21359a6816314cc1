from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL, Backend
from tinkex import types

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = types.SamplingParams(max_tokens=12, seed=7, stop=[])


@pytest.fixture
def sampler(backend: Backend) -> Iterator[tinkex.SamplingClient]:
    with backend.service() as service:
        yield service.create_sampling_client(base_model=BASE_MODEL)


def tokens(events: list[types.SampleStreamEvent], sample: int) -> list[types.SampledToken]:
    return [e for e in events if isinstance(e, types.SampledToken) and e.sample == sample]


@pytest.mark.slow
@pytest.mark.backends(*WITH_A_MODEL)
def test_a_stream_holds_what_a_sample_with_the_same_seed_returns(sampler: tinkex.SamplingClient) -> None:
    whole = sampler.sample(PROMPT, 2, PARAMS).result(60)
    stream = sampler.sample_stream(PROMPT, 2, PARAMS)
    events = list(stream)
    assert stream.streamed
    assert stream.request_id is not None
    done = events[-1]
    assert isinstance(done, types.SampleStreamDone)
    assert (done.stop_reasons, done.num_tokens, done.num_prompt_tokens) == (["length"] * 2, 24, 3)
    for number, sequence in enumerate(whole.sequences):
        mine = tokens(events, number)
        assert [e.token for e in mine] == sequence.tokens
        assert [e.logprob for e in mine] == sequence.logprobs
        text = sampler.get_tokenizer().decode(sequence.tokens)
        assert "".join(e.text or "" for e in mine) == text


@pytest.mark.backends(*WITH_A_MODEL)
def test_async_streams_are_incremental_and_run_concurrently(sampler: tinkex.SamplingClient) -> None:
    async def read() -> int:
        async with await sampler.sample_stream_async(PROMPT, 1, PARAMS) as stream:
            return len([event async for event in stream])

    async def run() -> list[int]:
        return list(await asyncio.gather(*(read() for _ in range(4))))

    assert asyncio.run(run()) == [13] * 4


@pytest.mark.backends(*WITH_A_MODEL)
def test_a_stream_that_is_closed_early_frees_its_place(sampler: tinkex.SamplingClient) -> None:
    for _ in range(3):
        with sampler.sample_stream(PROMPT, 1, types.SamplingParams(max_tokens=400, stop=[])) as stream:
            first = next(stream)
            assert isinstance(first, types.SampledToken)
            assert first.index == 0
        assert list(stream) == []
    assert len(sampler.sample(PROMPT, 1, PARAMS).result(60).sequences[0].tokens) == 12


@pytest.mark.backends(*WITH_A_MODEL)
def test_the_text_of_a_stream_ends_before_the_stop_string(sampler: tinkex.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=40, seed=3, stop=[])
    plain = "".join(e.text or "" for e in tokens(list(sampler.sample_stream(PROMPT, 1, params)), 0))
    stop = next(plain[i : i + 3] for i in range(4, len(plain)) if plain[i : i + 3].isascii())
    ended = list(sampler.sample_stream(PROMPT, 1, params.model_copy(update={"stop": [stop]})))
    assert "".join(e.text or "" for e in tokens(ended, 0)) == plain[: plain.index(stop)]
    assert tokens(ended, 0)[-1].stop_reason == "stop"


@pytest.mark.backends(*WITH_A_MODEL)
def test_bad_input_is_rejected_before_anything_is_streamed(sampler: tinkex.SamplingClient) -> None:
    with pytest.raises(tinkex.BadRequestError, match="context"):
        next(sampler.sample_stream(types.ModelInput.from_ints([1] * 100_000), 1, PARAMS))
