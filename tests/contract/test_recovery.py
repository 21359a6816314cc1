"""Runs resume from their checkpoints on every backend."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import numpy as np
import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL
from tests.recording import Recorder
from tinkex import types
from tinkex.observability.events import CallbackFailed, Event, RunRecovered
from tinkex.recovery import Best, RecoveryExecutor, RecoveryMonitor, RecoveryPolicy

pytestmark = pytest.mark.slow


def datum(shift: int = 0) -> types.Datum:
    tokens = [5 + shift, 9, 12, 7]
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})


def step(training: tinkex.TrainingClient, shift: int = 0) -> None:
    training.forward_backward([datum(shift)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)


def logprobs(training: tinkex.TrainingClient) -> Any:
    output = training.forward([datum()], "cross_entropy").result(timeout=60)
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


@pytest.fixture
def training(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, seed=1, user_metadata={"purpose": "test"})


@pytest.mark.parametrize(("choice", "name"), [("latest", "two"), (Best("loss"), "one")])
def test_a_run_restarts_from_its_checkpoint(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient, choice: Any, name: str
) -> None:
    expected = {}
    for saved, loss in (("one", "0.5"), ("two", "0.9")):
        step(training)
        training.save_state(saved, user_metadata={"loss": loss}).result(timeout=60)
        expected[saved] = logprobs(training)
    step(training)
    recovered = (
        RecoveryExecutor()
        .recover(training.model_id, service, RecoveryPolicy(checkpoint=choice))
        .result(timeout=60)
    )
    assert recovered is not None
    assert recovered.checkpoint == f"tinker://{training.model_id}/weights/{name}"
    np.testing.assert_array_equal(logprobs(recovered.training), expected[name])
    # the optimizer came along: the next step is the one the old run took
    if name == "two":
        step(recovered.training)
        np.testing.assert_array_equal(logprobs(recovered.training), logprobs(training))
    run = service.create_rest_client().get_training_run(recovered.training.model_id).result()
    assert run.user_metadata == {"purpose": "test"}


def test_a_run_that_is_well_is_left_alone(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    with RecoveryMonitor(service, RecoveryPolicy(poll_interval_s=600)) as monitor:
        monitor.watch(training)
        assert monitor.check().result(timeout=60) == {training.model_id: None}
        assert monitor.report(training, tinkex.APIConnectionError()).result(timeout=60) is None


@pytest.mark.backends(*WITH_A_MODEL)
def test_a_monitor_restarts_a_run_that_an_operation_found_gone(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    step(training)
    path = training.save_state("one").result(timeout=60).path
    training.unload().result(timeout=60)
    with RecoveryMonitor(service, RecoveryPolicy(poll_interval_s=600)) as monitor:
        monitor.watch(training)
        with pytest.raises(tinkex.APIStatusError) as caught:
            training.optim_step(types.AdamParams()).result(timeout=60)
        recovered = monitor.report(training, caught.value).result(timeout=60)
        assert recovered is not None
        assert recovered.checkpoint == path
        assert monitor.watched == (recovered.training.model_id,)


@pytest.mark.slow
@pytest.mark.backends(*WITH_A_MODEL)
def test_missing_checkpoints_are_skipped_and_without_any_recovery_fails(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    rest = service.create_rest_client()
    paths = {}
    for name in ("one", "two"):
        step(training)
        paths[name] = training.save_state(name).result(timeout=60).path
    training.unload().result(timeout=60)
    failures: list[tuple[str, Exception]] = []
    policy = RecoveryPolicy(
        backoff_s=0.01, max_backoff_s=0.02, on_failure=lambda run_id, error: failures.append((run_id, error))
    )
    executor = RecoveryExecutor()
    rest.delete_checkpoint_from_tinker_path(paths["two"]).result(timeout=60)
    recovered = executor.recover(training.model_id, service, policy).result(timeout=60)
    assert recovered is not None
    assert recovered.checkpoint == paths["one"]
    with pytest.raises(tinkex.RecoveryError, match=r"no checkpoint .* can be loaded"):
        executor.recover(
            training.model_id, service, dataclasses.replace(policy, checkpoint=paths["two"])
        ).result(timeout=60)
    rest.delete_checkpoint_from_tinker_path(paths["one"]).result(timeout=60)
    with pytest.raises(tinkex.RecoveryError, match="save checkpoints with save_state"):
        executor.recover(training.model_id, service, policy).result(timeout=60)
    assert [run_id for run_id, _ in failures] == [training.model_id] * 2
    step(recovered.training)  # the run created from it continues without it


@pytest.mark.backends(*WITH_A_MODEL)
def test_callbacks_that_raise_do_not_affect_a_restart(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    def mistaken(*args: Any) -> None:
        raise LookupError("a mistake of the program's")

    class Mistaken(Recorder):
        def emit(self, event: Event) -> None:
            super().emit(event)
            raise RuntimeError("a mistake of the sink's")

    step(training)
    path = training.save_state("one").result(timeout=60).path
    training.unload().result(timeout=60)
    sink = Mistaken()
    policy = RecoveryPolicy(poll_interval_s=600, on_recovery=mistaken)
    with RecoveryMonitor(service, policy, events=sink) as monitor:
        monitor.watch(training)
        with pytest.raises(tinkex.APIStatusError) as caught:
            training.optim_step(types.AdamParams()).result(timeout=60)
        recovered = monitor.report(training, caught.value).result(timeout=60)
        assert recovered is not None
        assert recovered.checkpoint == path
        assert monitor.watched == (recovered.training.model_id,)
    assert [event.reason for event in sink.of(CallbackFailed)] == ["LookupError: a mistake of the program's"]
    assert len(sink.of(RunRecovered)) == 1
    step(recovered.training)


def train_resiliently(service: tinkex.ServiceClient, lost_at: int | None) -> tuple[int, Any]:
    """How often the loop restarted, and the logprobs in the end; the run may be lost once on the way."""
    loop = tinkex.resilient_training(
        service,
        [[datum(n)] for n in range(6)],
        name=f"contract-{secrets.token_hex(4)}",
        base_model=BASE_MODEL,
        rank=4,
        seed=1,
        checkpoint_every=2,
    )
    for one in loop:
        with one:
            if one.index == lost_at and not loop.recoveries:
                one.training.unload().result(timeout=60)
            one.training.forward_backward(one.batch, "cross_entropy")
            one.training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=60)
    return loop.recoveries, logprobs(loop.training)


def train_plainly(service: tinkex.ServiceClient) -> Any:
    undisturbed = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    for n in range(6):
        step(undisturbed, n)
    return logprobs(undisturbed)


@pytest.mark.slow
def test_a_resilient_training_ends_like_a_plain_one(service: tinkex.ServiceClient) -> None:
    recoveries, ended = train_resiliently(service, None)
    assert recoveries == 0
    np.testing.assert_array_equal(ended, train_plainly(service))


@pytest.mark.slow
@pytest.mark.backends(*WITH_A_MODEL)
@pytest.mark.parametrize("lost_at", [1, 4])
def test_so_does_one_whose_run_was_lost(service: tinkex.ServiceClient, lost_at: int) -> None:
    recoveries, ended = train_resiliently(service, lost_at)
    assert recoveries == 1
    np.testing.assert_array_equal(ended, train_plainly(service))
