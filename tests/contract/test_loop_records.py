"""Metrics and rollouts of training loops: recorded by the server, reported by the loop, and read again."""

from __future__ import annotations

import asyncio
import math
import secrets
import time

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL, Backend
from tinkex import types
from tinkex.errors import Unsupported

with_a_model = pytest.mark.backends(*WITH_A_MODEL)


def new_run(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    # Runs of the suite share a server; a seed of its own tells this one from them.
    return service.create_lora_training_client(BASE_MODEL, rank=4, seed=secrets.randbelow(1000)).result(60)


def datum(length: int = 8) -> types.Datum:
    tokens = list(range(5, 6 + length))
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})


@with_a_model
def test_every_optimizer_step_has_metrics_without_any_call_for_them(backend: Backend) -> None:
    with backend.service() as service:
        training = new_run(service)
        losses, norms = [], []
        for step in range(3):
            passes = [training.forward_backward([datum()], "cross_entropy") for _ in range(step + 1)]
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-3)).result(60)
            losses.append(sum(one.result(60).metrics["loss:sum"] for one in passes))
            norms.append((stepped.metrics or {})["unclipped_grad_l2:mean"])
        training.forward_backward([datum()], "cross_entropy").result(60)  # belongs to no step yet
        found = backend.rest().get_training_run_metrics(training.model_id).result(30)
    assert (found.num_steps, found.num_tokens) == (3, 6 * 8)
    assert found["loss:sum"].steps == [1, 2, 3]
    assert found["loss:sum"].values == pytest.approx(losses)
    assert found["loss:mean"].values == pytest.approx([one / (8 * n) for n, one in enumerate(losses, 1)])
    assert found["unclipped_grad_l2:mean"].values == pytest.approx(norms)
    assert found["learning_rate:mean"].values == [1e-3] * 3
    assert found["num_tokens:sum"].values == [8, 16, 24]
    assert found["loss:sum"].tokens == [8, 24, 48]
    speeds = found["tokens_per_second:mean"].values
    assert len(speeds) == 3
    assert all(speed is not None and speed > 0 for speed in speeds)
    assert {one.source for one in found.series} == {"automatic"}


@with_a_model
def test_the_gap_between_sampler_and_trainer_is_recorded_for_losses_with_logprobs(backend: Backend) -> None:
    with backend.service() as service:
        training = new_run(service)
        exact = training.forward(
            [types.Datum(types.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})],
            "cross_entropy",
        ).result(60)
        own = exact.loss_fn_outputs[0]["logprobs"].tolist()
        shifted = [[0.0, own[1] + shift, own[2] - shift] for shift in (0.25, 0.5)]
        data = [
            types.Datum(
                types.ModelInput.from_ints([5, 6, 7]),
                {"target_tokens": [6, 7, 8], "logprobs": logprobs, "advantages": [0.0, 1.0, 0.0]},
            )
            for logprobs in shifted
        ]
        output = training.forward_backward(data, "importance_sampling").result(60)
        training.optim_step(types.AdamParams()).result(60)
        found = backend.rest().get_training_run_metrics(training.model_id, "logprob_gap:mean").result(30)
    assert output.metrics["logprob_gap:mean"] == pytest.approx(0.375, abs=1e-4)
    assert [one.name for one in found.series] == ["logprob_gap:mean"]
    assert found["logprob_gap:mean"].values == pytest.approx([0.375], abs=1e-4)


@with_a_model
def test_what_a_loop_logs_is_read_again(backend: Backend) -> None:
    with backend.service() as service:
        training = new_run(service)
        training.log_metrics(10, {"reward": 0.5, "accuracy": 1}).result(30)
        training.log_metrics(20, {"reward": math.nan}).result(30)
        training.log_metrics(20, {"<b>hostile</b>": -1e300}).result(30)
        training.log_metrics(10, {"reward": 0.75}).result(30)
        asyncio.run(training.log_metrics_async(30, {"reward": math.inf}))
        rest = backend.rest()
        found = rest.get_training_run_metrics(training.model_id).result(30)
        zoomed = rest.get_training_run_metrics(training.model_id, "reward", start=15, stop=25).result(30)
    assert (found["reward"].steps, found["reward"].values) == ([10, 20, 30], [0.75, None, None])
    assert found["accuracy"].values == [1.0]
    assert found["<b>hostile</b>"].values == [-1e300]
    assert (zoomed["reward"].steps, [one.name for one in zoomed.series]) == ([20], ["reward"])
    with pytest.raises(KeyError, match="accuracy"):
        _ = found["missing"]


@with_a_model
def test_rollouts_are_read_as_they_were_logged(backend: Backend) -> None:
    rollouts = [
        types.Rollout(
            tokens=[4, 5, place],
            logprobs=[-0.5, -0.25, -1.0],
            advantages=[0.5, 0.5, 0.5],
            reward=float(place),
            advantage=place - 1.5,
            group=str(place // 2),
            prompt_tokens=[1, 2],
            prompt="2 + 2 =",
            text=" 4 ☃",
            metrics={"reward/format": 1.0},
        )
        for place in range(4)
    ]
    with backend.service() as service:
        training = new_run(service)
        training.log_rollouts(3, rollouts[:2]).result(30)
        training.log_rollouts(3, rollouts[2:]).result(30)
        training.log_rollouts(7, [types.Rollout(text="no tokens")]).result(30)
        rest = backend.rest()
        found = rest.list_rollouts(training.model_id, 3).result(30)
        last = rest.list_rollouts(training.model_id).result(30)
        page = rest.list_rollouts(training.model_id, 3, limit=1, offset=2).result(30)
    assert found.steps == [3, 7]
    assert [logged.rollout for logged in found.rollouts] == rollouts
    assert [(logged.step, logged.place) for logged in found.rollouts] == [(3, place) for place in range(4)]
    assert [logged.rollout.text for logged in last.rollouts] == ["no tokens"]
    assert [logged.rollout for logged in page.rollouts] == rollouts[2:3]


def answer(prompt: list[int], tokens: list[int], advantage: float) -> types.Datum:
    """An answer as loops of reinforcement learning train on it."""
    zeros, ones = [0.0] * (len(prompt) - 1), [1.0] * len(tokens)
    inputs: dict[str, list[float]] = {
        "target_tokens": [*prompt[1:], *tokens],
        "logprobs": [*zeros, *(-0.5 * one for one in ones)],
        "advantages": [*zeros, *(advantage * one for one in ones)],
    }
    return types.Datum(types.ModelInput.from_ints([*prompt, *tokens][:-1]), inputs)


@with_a_model
def test_a_client_with_log_rollouts_reports_the_data_of_its_passes(backend: Backend) -> None:
    with backend.service(log_rollouts=True) as service:
        training = new_run(service)
        for step in (1, 2):
            data = [
                answer([5, 6, 7], [8, 9], 0.5),
                answer([5, 6, 7], [10], 0.0),
                answer([5, 4], [9, 9], -0.5 * step),
            ]
            training.forward_backward(iter(data[:2]), "importance_sampling")  # type: ignore[arg-type]
            training.forward_backward(data[2:], "importance_sampling")
            training.forward_backward([datum()], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-3)).result(60)
        rest = backend.rest()
        found = wait_for_rollouts(rest, training.model_id, step=2, count=3)
        assert rest.list_rollouts(training.model_id, 1).result(30).steps == [1, 2]
        training.log_rollouts(3, [types.Rollout(text="own")]).result(30)
        training.forward_backward([answer([5], [6], 1.0)], "importance_sampling").result(60)
        training.log_metrics(3, {"x": 1.0}).result(30)
        assert len(rest.list_rollouts(training.model_id, 3).result(30).rollouts) == 1
    assert [(one.group, one.prompt_tokens, one.tokens, one.advantage) for one in found] == [
        ("prompt 1", [5, 6, 7], [8, 9], 0.5),
        ("prompt 1", [5, 6, 7], [10], 0.0),
        ("prompt 2", [5, 4], [9, 9], -1.0),
    ]
    assert [one.logprobs for one in found] == [[-0.5, -0.5], [-0.5], [-0.5, -0.5]]


def wait_for_rollouts(rest: tinkex.RestClient, run_id: str, *, step: int, count: int) -> list[types.Rollout]:
    """The rollouts of a step, which arrive while the loop goes on."""
    deadline = time.monotonic() + 60
    while True:
        found = rest.list_rollouts(run_id, step).result(30).rollouts
        if len(found) >= count or time.monotonic() > deadline:
            return [logged.rollout for logged in found]
        time.sleep(0.01)


@with_a_model
def test_invalid_reports_are_rejected_and_change_nothing(backend: Backend) -> None:
    with backend.service() as service:
        training = new_run(service)
        with pytest.raises(ValueError, match="step is an integer"):
            training.log_metrics(-1, {"x": 1.0})
        with pytest.raises(ValueError, match="metrics\\['x'\\] must be a number"):
            training.log_metrics(1, {"x": "many"})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="a mapping"):
            training.log_metrics(1, [1.0])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="rollouts\\[0\\] is a dict"):
            training.log_rollouts(1, [{"text": "x"}])  # type: ignore[list-item]
        with pytest.raises(tinkex.BadRequestError, match="printable"):
            training.log_metrics(1, {"a\nb": 1.0}).result(30)
        with pytest.raises(tinkex.BadRequestError, match="1001 entries"):
            training.log_metrics(1, {f"m{n}": 1.0 for n in range(1001)}).result(30)
        rest = backend.rest()
        assert rest.get_training_run_metrics(training.model_id).result(30).series == []
        with pytest.raises(tinkex.NotFoundError, match="no training run 'unknown'"):
            rest.get_training_run_metrics("unknown").result(30)
        with pytest.raises(tinkex.BadRequestError, match="max_points is 1;"):
            rest.get_training_run_metrics(training.model_id, max_points=1).result(30)


@pytest.mark.backends("mock")
def test_log_rollouts_is_rejected_where_nothing_stores_them(backend: Backend) -> None:
    with (
        backend.service(log_rollouts=True) as service,
        pytest.raises(Unsupported, match="remove log_rollouts"),
    ):
        service.create_lora_training_client(BASE_MODEL, rank=4).result(30)


@pytest.mark.backends("mock")
def test_a_server_without_metrics_is_an_error_or_a_warning(backend: Backend) -> None:
    with backend.service() as service:
        training = service.create_lora_training_client(BASE_MODEL, rank=4)
        with pytest.raises(Unsupported, match="does not store metrics"):
            training.log_metrics(1, {"x": 1.0})
        with pytest.raises(Unsupported, match="does not store rollouts"):
            training.log_rollouts(1, [types.Rollout(text="x")])
        with pytest.warns(UserWarning, match="Nothing was sent"):
            training.log_metrics(1, {"x": 1.0}, if_unsupported="warn").result(30)
        with pytest.raises(ValueError, match="if_unsupported is"):
            training.log_metrics(1, {"x": 1.0}, if_unsupported="ignore")  # type: ignore[arg-type]
