"""The contract of a sampling client on every backend."""

from __future__ import annotations

import asyncio
import concurrent.futures

import numpy as np
import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL
from tinkex import types

PROMPT = types.ModelInput.from_ints([10, 11, 12, 13])


@pytest.fixture
def sampler(service: tinkex.ServiceClient) -> tinkex.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL)


def test_a_sample_has_tokens_logprobs_and_a_reason(sampler: tinkex.SamplingClient) -> None:
    future = sampler.sample(PROMPT, 3, types.SamplingParams(max_tokens=5, stop=[]))
    assert isinstance(future, concurrent.futures.Future)
    response = future.result(timeout=60)
    assert len(response.sequences) == 3
    assert len({s.sequence_id for s in response.sequences}) == 3
    for sequence in response.sequences:
        assert len(sequence.tokens) == 5
        assert sequence.stop_reason == "length"
        assert sequence.logprobs is not None
        assert len(sequence.logprobs) == 5


def test_many_samples_in_flight_all_complete(sampler: tinkex.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=3, stop=[])
    futures = [sampler.sample(PROMPT, 1, params) for _ in range(50)]
    assert [len(f.result(timeout=120).sequences[0].tokens) for f in futures] == [3] * 50


def test_async_sampling_returns_the_value(sampler: tinkex.SamplingClient) -> None:
    async def run() -> list[types.SampleResponse]:
        params = types.SamplingParams(max_tokens=2, stop=[])
        return list(await asyncio.gather(*(sampler.sample_async(PROMPT, 1, params) for _ in range(4))))

    assert len(asyncio.run(run())) == 4


def test_prompt_logprobs_start_with_none(sampler: tinkex.SamplingClient) -> None:
    logprobs = sampler.compute_logprobs(PROMPT).result(timeout=60)
    assert logprobs[0] is None
    assert all(lp is not None and lp <= 0 for lp in logprobs[1:])
    assert len(logprobs) == PROMPT.length


@pytest.mark.backends(*WITH_A_MODEL)
def test_two_clients_of_one_sampler_do_not_take_each_other_s_numbers(
    service: tinkex.ServiceClient, sampler: tinkex.SamplingClient
) -> None:
    session = service.holder
    (sampler_id,) = service.create_rest_client().get_session(session.get_session_id()).result().sampler_ids
    second = tinkex.SamplingClient.create(session, sampling_session_id=sampler_id).result(timeout=60)
    params = types.SamplingParams(max_tokens=2, stop=[])
    for number, client in enumerate([sampler, second, sampler, second], 1):
        prompt = types.ModelInput.from_ints([10] * number)
        assert len(client.sample(prompt, 1, params).result(timeout=60).sequences[0].tokens) == 2


@pytest.mark.backends(*WITH_A_MODEL)
def test_trainer_and_sampler_agree(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3)
    tokens = [10, 11, 12, 13, 14, 15]
    data = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
    for _ in range(3):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))
    sampler = training.save_weights_and_get_sampling_client()
    trained = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result(timeout=60)
    np.testing.assert_allclose(np.array(sampled[1:], dtype=np.float32), trained, atol=1e-4)


@pytest.mark.backends(*WITH_A_MODEL)
def test_a_sampler_keeps_the_weights_it_was_created_with(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3)
    sampler = training.save_weights_and_get_sampling_client()
    before = sampler.compute_logprobs(PROMPT).result(timeout=60)
    data = [types.Datum(types.ModelInput.from_ints([10, 11, 12]), {"target_tokens": [11, 12, 13]})]
    for _ in range(3):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-1)).result(timeout=60)
    assert sampler.compute_logprobs(PROMPT).result(timeout=60) == before
    assert (
        training.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result(timeout=60) != before
    )


@pytest.mark.backends(*WITH_A_MODEL)
def test_inflight_samplers_of_a_run_share_its_newest_inflight_weights(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3)
    data = [types.Datum(types.ModelInput.from_ints([10, 11, 12]), {"target_tokens": [11, 12, 13]})]

    def logprobs(client: tinkex.SamplingClient) -> list[float | None]:
        return client.compute_logprobs(PROMPT).result(timeout=60)

    def train() -> None:
        training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-1)).result(timeout=60)

    first = training.save_weights_and_get_sampling_client(kind="inflight")
    before = logprobs(first)
    train()
    assert logprobs(first) == before, "training alone changes nothing"
    second = training.save_weights_and_get_sampling_client(kind="inflight")
    after = logprobs(second)
    assert after != before
    assert logprobs(first) == after
    train()
    snapshot = training.save_weights_and_get_sampling_client()
    assert logprobs(first) == logprobs(second) == after, "a snapshot is not an inflight save"
    assert logprobs(snapshot) != after
    with pytest.raises(ValueError, match="kind is 'latest'; it is 'snapshot' or 'inflight'"):
        training.save_weights_and_get_sampling_client(kind="latest")  # type: ignore[arg-type]


@pytest.mark.backends(*WITH_A_MODEL)
def test_a_seed_gives_the_same_set_of_different_samples(sampler: tinkex.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=8, seed=7, stop=[])
    first, second = (sampler.sample(PROMPT, 4, params).result(timeout=60) for _ in range(2))
    assert [s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]
    assert len({tuple(s.tokens) for s in first.sequences}) > 1


def test_sampling_from_saved_weights_works(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4)
    path = training.save_weights_for_sampler("final").result().path
    sampler = service.create_sampling_client(model_path=path)
    response = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2, stop=[])).result(timeout=60)
    assert len(response.sequences[0].tokens) == 2
    assert sampler.get_base_model() == BASE_MODEL


@pytest.mark.backends(*WITH_A_MODEL)
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (types.ModelInput.empty(), "empty|prompt"),
        (types.ModelInput.from_ints([10**6]), "1000000"),
        (types.ModelInput.from_ints([5] * 5000), "context"),
    ],
)
def test_a_bad_prompt_is_rejected_and_the_sampler_continues(
    sampler: tinkex.SamplingClient, prompt: types.ModelInput, message: str
) -> None:
    with pytest.raises(tinkex.BadRequestError, match=message):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(timeout=60)
    sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result(timeout=60)
