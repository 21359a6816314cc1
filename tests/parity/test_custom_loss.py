"""A loss of the user's own moves the weights exactly as it does with the official client."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tinker
import torch

import tinkex
from tests.servers import ServedEngine
from tinkex.losses.custom import data_for_logprobs

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


def weighted(logprobs: Any, target_weights: Any) -> Any:
    loss = -(logprobs * target_weights).sum() + 0.05 * (logprobs**2).mean()
    return loss, {"custom/lp:mean": logprobs.mean(), "custom/loss:sum": loss}


def test_a_loss_that_the_server_runs_moves_the_weights_as_the_same_loss_run_here(
    served_engine: ServedEngine,
) -> None:
    rng = np.random.default_rng(4)
    with tinkex.ServiceClient(base_url=served_engine.url, api_key=served_engine.key) as service:
        ranks: dict[str, Any] = {"logprobs": 1, "target_weights": 1}
        handle = service.create_custom_loss(weighted, ranks).result()
        assert handle.loss_id is not None, "our server runs losses itself"
        data = []
        for _ in range(3):
            tokens = rng.integers(5, 200, 9).tolist()
            inputs = {"target_tokens": tokens[1:], "target_weights": rng.random(8).astype(np.float32)}
            data.append(tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), inputs))
        here = dataclasses.replace(handle, loss_id=None)
        after, metrics = [], []
        for loss in (handle, here):
            training = service.create_lora_training_client(MODEL, rank=4, seed=7)
            for _ in range(2):
                output = training.forward_backward_custom(data, loss).result()
                training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
            metrics.append(output.metrics)
            passed = training.forward(data_for_logprobs(data), "cross_entropy").result()
            after.append([lp for one in passed.loss_fn_outputs for lp in one["logprobs"].tolist()])
    np.testing.assert_allclose(after[0], after[1], rtol=1e-4, atol=1e-5)
    for name in ("loss:sum", "custom/lp:mean", "custom/loss:sum"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4)


def scaled(logprobs: Any, strength: Any) -> Any:
    return -strength * logprobs.sum(), {"custom/strength:sum": strength}


@pytest.mark.parametrize("sdk", [tinkex, tinker])
def test_a_loss_that_the_server_runs_reads_a_number_of_no_dimensions(
    sdk: Any, served_engine: ServedEngine
) -> None:
    with sdk.ServiceClient(base_url=served_engine.url, api_key=served_engine.key) as service:
        handle = service.create_custom_loss(scaled, {"logprobs": 1, "strength": 0}).result()
        assert handle.loss_id is not None, "our server runs losses itself"
        training = service.create_lora_training_client(MODEL, rank=2, seed=7)
        inputs = {"target_tokens": np.array([6, 7]), "strength": np.array(0.5, np.float32)}
        datum = sdk.Datum(model_input=sdk.ModelInput.from_ints([5, 6]), loss_fn_inputs=inputs)
        output = training.forward_backward_custom([datum], handle).result()
    logprobs = output.loss_fn_outputs[0]["logprobs"].tolist()
    assert output.metrics["custom/strength:sum"] == 0.5
    assert output.metrics["loss:sum"] == pytest.approx(-0.5 * sum(logprobs), rel=1e-5)


def test_the_weights_after_two_steps_are_the_official_client_s(served_engine: ServedEngine) -> None:
    our_metrics, our_logprobs = after_two_steps(tinkex, served_engine)
    their_metrics, their_logprobs = after_two_steps(tinker, served_engine)
    np.testing.assert_allclose(our_logprobs, their_logprobs, rtol=1e-5, atol=1e-6)
    assert [m.keys() for m in our_metrics] == [m.keys() for m in their_metrics]
    for ours, theirs in zip(our_metrics, their_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert our_metrics[1]["loss:sum"] < our_metrics[0]["loss:sum"]
