"""The contract of a training client on every backend."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL
from tinkex import types


def datum(length: int = 6, shift: int = 0) -> types.Datum:
    tokens = [(i + shift) % 50 + 5 for i in range(length + 1)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
    )


@pytest.fixture
def training(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)


def test_a_pass_returns_logprobs_in_the_shape_of_the_targets(training: tinkex.TrainingClient) -> None:
    data = [datum(3), datum(7), datum(5)]
    output = training.forward_backward(data, "cross_entropy").result()
    assert [o["logprobs"].shape for o in output.loss_fn_outputs] == [[3], [7], [5]]
    assert all(o["logprobs"].dtype == "float32" for o in output.loss_fn_outputs)
    assert "loss:sum" in output.metrics


def test_the_loss_is_the_negative_sum_of_weighted_logprobs(training: tinkex.TrainingClient) -> None:
    output = training.forward([datum(4), datum(6, shift=3)], "cross_entropy").result()
    total = sum(float(o["logprobs"].to_numpy().sum()) for o in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(-total, rel=1e-4)


def test_many_datums_come_back_in_order(training: tinkex.TrainingClient) -> None:
    data = [datum(1 + i % 7, shift=i) for i in range(40)]
    output = training.forward(data, "cross_entropy").result()
    assert [o["logprobs"].shape for o in output.loss_fn_outputs] == [[1 + i % 7] for i in range(40)]


def test_datums_that_begin_alike_come_back_as_they_do_alone(training: tinkex.TrainingClient) -> None:
    whole = datum(30)
    data = [whole, datum(30, shift=1), datum(12), whole]
    together = training.forward(data, "cross_entropy").result()
    for own, each in zip(together.loss_fn_outputs, data, strict=True):
        [alone] = training.forward([each], "cross_entropy").result().loss_fn_outputs
        np.testing.assert_allclose(own["logprobs"].to_numpy(), alone["logprobs"].to_numpy(), atol=1e-4)


def test_operations_may_be_pipelined_without_waiting(training: tinkex.TrainingClient) -> None:
    steps = []
    for _ in range(5):
        steps.append(training.forward_backward([datum()], "cross_entropy"))
        steps.append(training.optim_step(types.AdamParams(learning_rate=1e-3)))
    results = [step.result(timeout=60) for step in steps]
    assert all(isinstance(r, types.ForwardBackwardOutput) for r in results[::2])
    assert all(isinstance(r, types.OptimStepResponse) for r in results[1::2])


def test_async_calls_return_a_future_to_await(training: tinkex.TrainingClient) -> None:
    async def run() -> types.ForwardBackwardOutput:
        future = await training.forward_backward_async([datum()], "cross_entropy")
        await (await training.optim_step_async(types.AdamParams()))
        return await future

    # A new event loop each time, as programs that call asyncio.run per step do.
    for _ in range(2):
        assert "loss:sum" in asyncio.run(run()).metrics


def test_checkpoints_of_one_name_and_two_kinds_coexist(training: tinkex.TrainingClient) -> None:
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(types.AdamParams())
    state = training.save_state("000004").result()
    sampler = training.save_weights_for_sampler("000004").result()
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(state.path)
    assert parsed.training_run_id == training.model_id
    assert parsed.checkpoint_id == "weights/000004"
    assert types.ParsedCheckpointTinkerPath.from_tinker_path(sampler.path).checkpoint_type == "sampler"


def test_a_run_resumes_from_its_checkpoint(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    for _ in range(2):
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))
    path = training.save_state("resume").result().path
    expected = training.forward([datum()], "cross_entropy").result()
    again = service.create_training_client_from_state_with_optimizer(path)
    assert again.model_id != training.model_id
    output = again.forward([datum()], "cross_entropy").result()
    np.testing.assert_array_equal(
        output.loss_fn_outputs[0]["logprobs"].to_numpy(), expected.loss_fn_outputs[0]["logprobs"].to_numpy()
    )


def test_info_names_the_base_model_and_the_rank(training: tinkex.TrainingClient) -> None:
    info = training.get_info()
    assert info.model_id == training.model_id
    assert info.model_data.model_name == BASE_MODEL
    assert info.is_lora
    assert info.lora_rank == 4


def test_empty_data_is_rejected_before_anything_is_sent(training: tinkex.TrainingClient) -> None:
    with pytest.raises(ValueError, match="data"):
        training.forward_backward([], "cross_entropy")
    training.forward_backward([datum()], "cross_entropy").result(timeout=60)


@pytest.mark.backends(*WITH_A_MODEL)
@pytest.mark.parametrize(
    ("wrong", "loss_fn", "message"),
    [
        (
            types.Datum(types.ModelInput.from_ints([5, 6]), {"target_tokens": [6]}),
            "cross_entropy",
            "length|tokens",
        ),
        (
            types.Datum(types.ModelInput.from_ints([5, 10**6]), {"target_tokens": [6, 7]}),
            "cross_entropy",
            "1000000",
        ),
        (
            types.Datum(types.ModelInput.from_ints([5, 6]), {"target_tokens": [6, 10**6]}),
            "cross_entropy",
            "1000000",
        ),
        (
            types.Datum(types.ModelInput.from_ints([5] * 5000), {"target_tokens": [5] * 5000}),
            "cross_entropy",
            "context",
        ),
        (types.Datum(types.ModelInput.from_ints([5, 6]), {}), "cross_entropy", "target_tokens"),
    ],
)
def test_bad_input_is_a_typed_error_and_the_run_continues(
    training: tinkex.TrainingClient, wrong: types.Datum, loss_fn: str, message: str
) -> None:
    before = training.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
    with pytest.raises(tinkex.TinkerError, match=message) as caught:
        training.forward_backward([wrong], loss_fn).result(timeout=60)  # type: ignore[arg-type]
    assert isinstance(caught.value, tinkex.BadRequestError | tinkex.RequestFailedError)
    after = training.forward([datum()], "cross_entropy").result(timeout=60).metrics["loss:sum"]
    assert after == before


def test_the_error_for_an_unknown_model_lists_the_served_ones(service: tinkex.ServiceClient) -> None:
    with pytest.raises(tinkex.TinkerError, match=BASE_MODEL):
        service.create_lora_training_client("nobody/has-this", rank=4)
    served = [m.model_name for m in service.get_server_capabilities().supported_models]
    assert BASE_MODEL in served


def test_several_models_train_side_by_side(service: tinkex.ServiceClient) -> None:
    runs = [service.create_lora_training_client(BASE_MODEL, rank=r, seed=r) for r in (2, 4, 8)]
    assert len({run.model_id for run in runs}) == 3
    futures = [
        (run.forward_backward([datum()], "cross_entropy"), run.optim_step(types.AdamParams())) for run in runs
    ]
    for forward, step in futures:
        assert "loss:sum" in forward.result(timeout=60).metrics
        step.result(timeout=60)
