"""A loss of the user's own moves the weights exactly as it does with the official client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch

import tinkex
from tests.servers import ServedEngine

MODEL = "tiny/llama"

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the official client leaves sockets to the garbage collector


def pairwise(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Prefer the first datum to the second, and stay close to where we are."""
    margin = logprobs[0].sum() - logprobs[1].sum()
    loss = -torch.nn.functional.logsigmoid(0.1 * margin) + 0.01 * (logprobs[2] ** 2).mean()
    return loss, {"margin": float(margin.detach())}


def after_two_steps(sdk: Any, engine: ServedEngine) -> tuple[list[dict[str, float]], list[float]]:
    rng = np.random.default_rng(3)
    sentences = [rng.integers(5, 200, 10).tolist() for _ in range(3)]
    with sdk.ServiceClient(base_url=engine.url, api_key=engine.key) as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=7)
        data = [
            sdk.Datum(
                model_input=sdk.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:]},
            )
            for tokens in sentences
        ]
        metrics = []
        for _ in range(2):
            metrics.append(training.forward_backward_custom(data, pairwise).result().metrics)
            training.optim_step(sdk.AdamParams(learning_rate=1e-2)).result()
        output = training.forward(data, "cross_entropy").result()
        return metrics, [lp for one in output.loss_fn_outputs for lp in one["logprobs"].tolist()]


def test_the_weights_after_two_steps_are_the_official_client_s(served_engine: ServedEngine) -> None:
    our_metrics, our_logprobs = after_two_steps(tinkex, served_engine)
    their_metrics, their_logprobs = after_two_steps(tinker, served_engine)
    np.testing.assert_allclose(our_logprobs, their_logprobs, rtol=1e-5, atol=1e-6)
    assert [m.keys() for m in our_metrics] == [m.keys() for m in their_metrics]
    for ours, theirs in zip(our_metrics, their_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert our_metrics[1]["loss:sum"] < our_metrics[0]["loss:sum"]
