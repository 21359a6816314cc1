"""A user's program, checked by mypy --strict and basedpyright in scripts/check; it is never run.

The assertions say what a user's type checker sees: what each call takes and returns.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any, assert_type

import numpy as np

import tinkex
from tinkex import types


def main() -> None:
    with tinkex.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client("model", rank=8, train_unembed=False)
        client: tinkex.TrainingClient = training
        assert_type(client.model_id, str)
        datum = types.Datum(
            types.ModelInput.from_ints([1, 2]),
            {
                "target_tokens": [2, 3],
                "weights": np.ones(2),
                "mask": types.TensorData(data=[1], dtype="int64"),
            },
        )
        step = training.forward_backward([datum], "cross_entropy", {"clip": 0.2})
        assert_type(step, tinkex.AwaitableConcurrentFuture[types.ForwardBackwardOutput])
        assert_type(step.result(timeout=3).metrics, dict[str, float])
        assert_type(datum.loss_fn_inputs["weights"], types.TensorData)
        assert_type(training.optim_step(types.AdamParams()).result(), types.OptimStepResponse)
        sampler = training.save_weights_and_get_sampling_client()
        sample = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(stop=["\n"]))
        plain: concurrent.futures.Future[types.SampleResponse] = sample
        assert_type(plain.result(), types.SampleResponse)
        assert_type(sample.result().sequences[0].tokens, list[int])


async def main_async() -> None:
    service = tinkex.ServiceClient()
    training = await service.create_lora_training_client_async("model")
    future = await training.forward_backward_async([], "ppo")
    assert_type(await future, types.ForwardBackwardOutput)
    sampler = await training.save_weights_and_get_sampling_client_async()
    assert_type(await sampler.compute_logprobs_async(types.ModelInput.empty()), list[float | None])
    assert_type(await sampler.sample_async(types.ModelInput.empty(), num_samples=1, sampling_params=types.SamplingParams()), types.SampleResponse)  # fmt: skip
    assert_type(await training.get_info_async(), types.GetInfoResponse)
    info: types.GetInfoResponse = training.get_info()
    assert_type(info.model_id, str)
    assert_type(
        await training.optim_step_async(types.AdamParams()),
        tinkex.AwaitableConcurrentFuture[types.OptimStepResponse],
    )
    rest = service.create_rest_client()
    assert_type(rest.get_sampler("id"), tinkex.AwaitableConcurrentFuture[types.GetSamplerResponse])
    assert_type(await rest.get_sampler_async("id"), types.GetSamplerResponse)
    assert_type(await rest.get_session_async("id", access_scope="owned"), types.GetSessionResponse)
    async for run in rest.iter_training_runs_async(page_size=10):
        assert_type(run, types.TrainingRun)
    for session_id in rest.iter_sessions():
        assert_type(session_id, str)


class Recording(tinkex.SamplingClient):
    """A subclass may replace either form of a method, or both."""

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        **options: Any,
    ) -> tinkex.AwaitableConcurrentFuture[types.SampleResponse]:
        return super().sample(prompt, num_samples, sampling_params, **options)

    async def get_base_model_async(self) -> str:
        return await super().get_base_model_async()


def mistakes(service: tinkex.ServiceClient, rest: tinkex.RestClient) -> None:
    """Derived forms are checked like any others; without the comments these lines are errors."""
    service.create_lora_training_client()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    service.create_lora_training_client("m", rank="8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    _ = rest.get_session_async(session="x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
