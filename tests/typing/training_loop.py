"""A user's program, checked by mypy --strict and basedpyright in scripts/check; it is never run.

The assertions say what a user's type checker sees: what each call takes and returns.
"""

from __future__ import annotations

import concurrent.futures
from typing import assert_type

import numpy as np

import tinkex
from tinkex import types


def main() -> None:
    with tinkex.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client("model", rank=8, train_unembed=False)
        assert_type(training, tinkex.TrainingClient)
        datum = types.Datum(
            types.ModelInput.from_ints([1, 2]),
            {
                "target_tokens": [2, 3],
                "weights": np.ones(2),
                "mask": types.TensorData(data=[1], dtype="int64"),
            },
        )
        step = training.forward_backward([datum], "cross_entropy", {"clip": 0.2})
        assert_type(step, tinkex.APIFuture[types.ForwardBackwardOutput])
        assert_type(step.result(timeout=3).metrics, dict[str, float])
        assert_type(datum.loss_fn_inputs["weights"], types.TensorData)
        assert_type(training.optim_step(types.AdamParams()).result(), types.OptimStepResponse)
        sampler = training.save_weights_and_get_sampling_client()
        sample = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(stop=["\n"]))
        assert_type(sample, concurrent.futures.Future[types.SampleResponse])
        assert_type(sample.result().sequences[0].tokens, list[int])


async def main_async() -> None:
    service = tinkex.ServiceClient()
    training = await service.create_lora_training_client_async("model")
    future = await training.forward_backward_async([], "ppo")
    assert_type(await future, types.ForwardBackwardOutput)
    sampler = await training.save_weights_and_get_sampling_client_async()
    assert_type(await sampler.compute_logprobs_async(types.ModelInput.empty()), list[float | None])
