"""The trainer as its callers see it: jobs in, outputs or errors out, states changed or left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.trainer.harness import (
    VOCAB,
    naive_logprobs,
    random_datum,
    run_one,
    sequence,
    sft_datum,
    small_transformer,
    trained_state,
)
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.backbone import Backbone, Tenant
from tinkex.engine.trainer.batch import PackedBatch
from tinkex.engine.trainer.buffers import BufferPool
from tinkex.engine.trainer.losses import LOSSES
from tinkex.engine.trainer.trainer import MAX_RANK, Trainer, TrainJob
from tinkex.errors import EngineFailure, InvalidInput, NumericalError
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.training import AdamParams, LoraConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small_transformer(tmp_path_factory.mktemp("small"))


@pytest.fixture
def trainer(model: Transformer) -> Trainer:
    return Trainer(model)


def sft_data(*lengths: int, seed: int = 0) -> list[Datum]:
    random = np.random.default_rng(seed)
    return [sft_datum(sequence(random, length)) for length in lengths]


def overflowing() -> Datum:
    """A datum whose importance ratio overflows fp32."""
    tokens = [1, 2, 3]
    inputs = {"target_tokens": tokens[1:], "logprobs": [-1e4, -1e4], "advantages": [1.0, 1.0]}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_training_lowers_the_loss(trainer: Trainer) -> None:
    state = trainer.create(LoraConfig(rank=4, seed=0))
    job = TrainJob(state, sft_data(12, 7), "cross_entropy")
    losses = []
    for _ in range(15):
        losses.append(run_one(trainer, job).metrics["loss:sum"])
        trainer.optim_step(state, AdamParams(learning_rate=2e-2))
    assert losses[-1] < 0.5 * losses[0]


def test_logprobs_come_back_for_every_target_also_where_nothing_trains(
    trainer: Trainer, model: Transformer
) -> None:
    state = trained_state(trainer)
    tokens = sequence(np.random.default_rng(0), 8)
    silent = sft_datum(tokens, [0.0] * 8)
    output = run_one(trainer, TrainJob(state, [silent, sft_datum(tokens, prompt=5)], "cross_entropy"))
    expected = naive_logprobs(model, state, silent).detach().numpy()
    for fields in output.loss_fn_outputs:
        assert fields["logprobs"].dtype == "float32"
        np.testing.assert_allclose(fields["logprobs"].to_numpy(), expected, rtol=1e-5)
    losses = output.loss_fn_outputs[1]["elementwise_loss"].to_numpy()
    np.testing.assert_allclose(losses, np.where(np.arange(8) < 5, 0, -expected), rtol=1e-5)
    assert output.loss_fn_output_type == "CrossEntropyLossReturn"


def test_outputs_keep_the_order_of_the_data(trainer: Trainer, model: Transformer) -> None:
    state = trained_state(trainer)
    data = sft_data(9, 3, 14, 3, 1)
    output = run_one(trainer, TrainJob(state, data, "cross_entropy"))
    for datum, fields in zip(data, output.loss_fn_outputs, strict=True):
        expected = naive_logprobs(model, state, datum).detach().numpy()
        np.testing.assert_allclose(fields["logprobs"].to_numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_metric_names_have_one_colon_and_loss_sum_is_the_sum(trainer: Trainer, loss_fn: str) -> None:
    random = np.random.default_rng(1)
    data = [random_datum(loss_fn, random, length) for length in (5, 8)]
    output = run_one(trainer, TrainJob(trained_state(trainer), data, loss_fn))
    assert all(name.count(":") == 1 for name in output.metrics)
    total = sum(fields["elementwise_loss"].to_numpy().sum() for fields in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert output.metrics["num_tokens:sum"] == 13


def test_metrics_of_two_halves_combine_to_those_of_the_whole(trainer: Trainer) -> None:
    random = np.random.default_rng(1)
    data = [random_datum("ppo", random, length) for length in (5, 8, 6)]
    state = trained_state(trainer)
    whole, first, rest = (
        run_one(trainer, TrainJob(state, part, "ppo", backward=False)).metrics
        for part in (data, data[:1], data[1:])
    )
    for name in ("loss:sum", "num_tokens:sum"):
        assert whole[name] == pytest.approx(first[name] + rest[name], rel=1e-5)
    for name in ("kl_q_p:mean", "clip_fraction:mean"):
        assert whole[name] == pytest.approx((first[name] + 2 * rest[name]) / 3, rel=1e-4)


def test_a_forward_pass_leaves_no_gradient(trainer: Trainer) -> None:
    state = trained_state(trainer)
    forward = run_one(trainer, TrainJob(state, sft_data(6), "cross_entropy", backward=False))
    assert state.grad is None
    backward = run_one(trainer, TrainJob(state, sft_data(6), "cross_entropy"))
    assert state.grad is not None
    assert forward.metrics == pytest.approx(backward.metrics)


def test_forward_and_backward_jobs_of_several_tenants_share_a_call(trainer: Trainer) -> None:
    states = [trained_state(trainer, seed=n) for n in range(3)]
    jobs = [
        TrainJob(state, sft_data(5, seed=n), "cross_entropy", None, n != 1) for n, state in enumerate(states)
    ]
    outputs = trainer.run(jobs)
    assert not any(isinstance(output, Exception) for output in outputs)
    assert [state.grad is not None for state in states] == [True, False, True]


@pytest.mark.parametrize("room", [0, 2, 5])
def test_more_jobs_than_their_gradients_have_room_for_run_in_groups(
    model: Transformer, trainer: Trainer, room: int
) -> None:
    states = [trained_state(trainer, seed=n) for n in range(5)]
    jobs = [
        TrainJob(state, sft_data(5, seed=n), "cross_entropy", None, n != 2) for n, state in enumerate(states)
    ]
    expected = [run_one(trainer, job).metrics["loss:sum"] for job in jobs]
    limited = Trainer(model, max_gradient_bytes=room * states[0].adapter.params.nbytes)
    outputs = limited.run(jobs)
    assert [o.metrics["loss:sum"] for o in outputs if not isinstance(o, Exception)] == pytest.approx(expected)


def test_two_jobs_of_one_model_in_one_call_add_up(trainer: Trainer) -> None:
    state, reference = trained_state(trainer), trained_state(trainer)
    first, second = sft_data(5, 9), sft_data(4, seed=1)
    trainer.run([TrainJob(state, data, "cross_entropy") for data in (first, second)])
    run_one(trainer, TrainJob(reference, [*first, *second], "cross_entropy"))
    assert state.grad is not None
    assert reference.grad is not None
    np.testing.assert_allclose(state.grad.numpy(), reference.grad.numpy(), rtol=1e-4, atol=2e-5)


def test_an_adapter_that_ran_away_is_distinguished_from_bad_data_and_harms_no_other_job(
    trainer: Trainer,
) -> None:
    lost, good = trained_state(trainer, seed=1), trained_state(trainer, seed=2)
    lost.adapter.params.fill_(float("nan"))
    inputs = {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [0.0, 0.0]}
    unweighted = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    failed, unseen, succeeded = trainer.run(
        [
            TrainJob(lost, sft_data(5), "cross_entropy"),
            TrainJob(lost, [unweighted], "ppo", backward=False),
            TrainJob(good, sft_data(7), "cross_entropy"),
        ]
    )
    for one in (failed, unseen):
        assert isinstance(one, NumericalError)
        assert "logprob of data[0] at flat position 0 is nan" in str(one)
        assert "load an earlier checkpoint" in str(one)
    assert not isinstance(succeeded, Exception)
    assert lost.grad is None
    assert good.grad is not None


@pytest.mark.parametrize("backward", [True, False])
def test_a_job_that_overflows_fails_alone(trainer: Trainer, backward: bool) -> None:
    good, bad = trained_state(trainer, seed=1), trained_state(trainer, seed=2)
    earlier = torch.ones_like(bad.adapter.params)
    bad.grad = earlier.clone()
    jobs = [
        TrainJob(
            bad, [random_datum("ppo", np.random.default_rng(0), 4), overflowing()], "ppo", None, backward
        ),
        TrainJob(good, sft_data(7), "cross_entropy", None, backward),
        TrainJob(bad, [overflowing()], "importance_sampling", None, backward),
    ]
    ppo, succeeded, sampling = trainer.run(jobs)
    assert not isinstance(
        ppo, Exception
    )  # ppo clips what overflows: advantage above 0, ratio above its bound
    assert isinstance(sampling, NumericalError)
    assert "data[0] at flat position 0 is -inf" in str(sampling)
    assert not isinstance(succeeded, Exception)
    if backward:
        assert good.grad is not None
        assert bool(torch.isfinite(good.grad).all())
        assert bad.grad is not None
        assert not torch.equal(bad.grad, earlier)  # of the job that succeeded
        assert bool(torch.isfinite(bad.grad).all())
    else:
        assert good.grad is None


def test_a_job_that_overflows_in_the_model_fails_alone(trainer: Trainer) -> None:
    good, bad = trained_state(trainer, seed=1), trained_state(trainer, seed=2)
    bad.adapter = bad.adapter.with_params(bad.adapter.params * 1e30)
    failed, succeeded = trainer.run([TrainJob(state, sft_data(7), "cross_entropy") for state in (bad, good)])
    assert isinstance(failed, NumericalError)
    assert bad.grad is None
    assert not isinstance(succeeded, Exception)
    assert good.grad is not None
    alone = trained_state(trainer, seed=1)
    run_one(trainer, TrainJob(alone, sft_data(7), "cross_entropy"))
    assert alone.grad is not None
    np.testing.assert_allclose(good.grad.numpy(), alone.grad.numpy(), rtol=1e-4, atol=2e-5)


def test_a_rejected_job_does_not_stop_the_others(trainer: Trainer) -> None:
    state = trained_state(trainer)
    graph_error, output = trainer.run(
        [TrainJob(state, [], "cross_entropy"), TrainJob(state, sft_data(4), "cross_entropy")]
    )
    assert isinstance(graph_error, InvalidInput)
    assert not isinstance(output, Exception)


def test_check_rejects_what_run_would_reject(trainer: Trainer) -> None:
    state = trained_state(trainer)
    trainer.check(TrainJob(state, sft_data(4), "cross_entropy"))
    with pytest.raises(InvalidInput, match="nll"):
        trainer.check(TrainJob(state, sft_data(4), "nll"))
    with pytest.raises(InvalidInput, match=f"0…{VOCAB - 1}"):
        trainer.check(TrainJob(state, [sft_datum([1, VOCAB])], "cross_entropy"))
    with pytest.raises(InvalidInput, match="context is 64"):
        trainer.check(TrainJob(state, [sft_datum([1] * 66)], "cross_entropy"))


@pytest.mark.slow
def test_a_deterministic_trainer_gives_the_same_bits_in_any_call(model: Transformer) -> None:
    trainer = Trainer(model, max_tokens_per_pass=24, deterministic=True)

    def job() -> TrainJob:
        return TrainJob(trained_state(trainer, seed=1), sft_data(9, 5, 17), "cross_entropy")

    def neighbour(seed: int, *lengths: int) -> TrainJob:
        return TrainJob(trained_state(trainer, seed=seed), sft_data(*lengths, seed=seed), "cross_entropy")

    alone, crowded = job(), job()
    alone_output = run_one(trainer, alone)
    _, crowded_output, _ = trainer.run([neighbour(2, 3, 9), crowded, neighbour(3, 30)])
    assert not isinstance(crowded_output, Exception)
    assert alone.state.grad is not None
    assert crowded.state.grad is not None
    assert torch.equal(alone.state.grad, crowded.state.grad)
    assert alone_output.metrics == crowded_output.metrics
    for own, other in zip(alone_output.loss_fn_outputs, crowded_output.loss_fn_outputs, strict=True):
        assert own["logprobs"].data == other["logprobs"].data


class Forgetful(Transformer):
    """A model that runs out of memory beyond some rows."""

    max_rows = 10

    def __init__(self, model: Transformer) -> None:
        super().__init__(
            model.arch, embedding_VD=model.embedding_VD, layers=model.layers, norm_D=model.norm_D
        )
        rotary = self.rotary

        def limited(positions_T: torch.Tensor) -> Any:
            if len(positions_T) > self.max_rows:
                raise MemoryError
            return rotary(positions_T)

        self.rotary = limited  # type: ignore[assignment]


def forgetful(model: Transformer) -> Trainer:
    return Trainer(Forgetful(model))


def test_a_batch_that_does_not_fit_in_memory_is_split(model: Transformer, trainer: Trainer) -> None:
    small = forgetful(model)
    state, reference = trained_state(small), trained_state(trainer)
    run_one(small, TrainJob(state, sft_data(9, 4, 4, 10, 7), "cross_entropy"))
    run_one(trainer, TrainJob(reference, sft_data(9, 4, 4, 10, 7), "cross_entropy"))
    assert state.grad is not None
    assert reference.grad is not None
    np.testing.assert_allclose(state.grad.numpy(), reference.grad.numpy(), rtol=1e-4, atol=2e-5)


def test_a_pass_that_runs_out_of_memory_frees_the_spare_buffers_first(model: Transformer) -> None:
    forgets, spare, seen = Forgetful(model), BufferPool(2**20), []
    rotary = forgets.rotary

    def watched(positions_T: torch.Tensor) -> Any:
        seen.append(spare.num_bytes)
        return rotary(positions_T)

    forgets.rotary = watched  # type: ignore[assignment]
    small = Trainer(forgets, buffers=spare)
    state = trained_state(small)
    spare.release(torch.zeros(1000))
    run_one(small, TrainJob(state, sft_data(9, 4), "cross_entropy"))
    assert seen[0] == 4000
    assert len(seen) > 1
    assert not any(seen[1:])


@pytest.mark.slow
def test_a_sequence_that_does_not_fit_in_memory_fails_its_job_alone(model: Transformer) -> None:
    small = forgetful(model)
    states = [trained_state(small, seed=n) for n in range(2)]
    failed, output = small.run(
        [
            TrainJob(states[0], sft_data(3, 11), "cross_entropy"),
            TrainJob(states[1], sft_data(9), "cross_entropy"),
        ]
    )
    assert isinstance(failed, EngineFailure)
    assert "11 tokens" in str(failed)
    assert states[0].grad is None
    assert not isinstance(output, Exception)


def test_a_sequence_that_fits_only_if_its_layers_are_computed_twice_trains_the_same(
    model: Transformer, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = Backbone.hidden

    def limited(
        self: Backbone, packed: PackedBatch, tenants: Sequence[Tenant], *, recompute: bool = False
    ) -> torch.Tensor:
        if len(packed.tokens_T) > 10 and not recompute:
            raise MemoryError
        return hidden(self, packed, tenants, recompute=recompute)

    reference, states = trained_state(trainer), [trained_state(trainer), trained_state(trainer, seed=7)]
    run_one(trainer, TrainJob(reference, sft_data(20, 3, 15), "cross_entropy"))
    monkeypatch.setattr(Backbone, "hidden", limited)
    long, short = trainer.run(
        [
            TrainJob(states[0], sft_data(20, 3, 15), "cross_entropy"),
            TrainJob(states[1], sft_data(9), "cross_entropy"),
        ]
    )
    assert not isinstance(long, Exception)
    assert not isinstance(short, Exception)
    assert states[0].grad is not None
    assert reference.grad is not None
    np.testing.assert_allclose(states[0].grad.numpy(), reference.grad.numpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("flags", [{}, {"train_attn": False, "train_mlp": False}])
@pytest.mark.slow
def test_a_sequence_longer_than_the_budget_trains_the_same(
    model: Transformer, trainer: Trainer, flags: dict[str, bool]
) -> None:
    thrifty = Trainer(model, max_tokens_per_pass=8)
    state, reference = trained_state(thrifty, **flags), trained_state(trainer, **flags)
    run_one(thrifty, TrainJob(state, sft_data(20, 3), "cross_entropy"))
    run_one(trainer, TrainJob(reference, sft_data(20, 3), "cross_entropy"))
    assert state.grad is not None
    assert reference.grad is not None
    np.testing.assert_allclose(state.grad.numpy(), reference.grad.numpy(), rtol=1e-4, atol=2e-5)


def test_a_snapshot_never_changes(trainer: Trainer) -> None:
    state = trained_state(trainer)
    snapshot = trainer.snapshot(state)
    again = trainer.snapshot(state)
    assert again.params.data_ptr() == snapshot.params.data_ptr() == state.adapter.params.data_ptr()
    before = snapshot.params.clone()
    run_one(trainer, TrainJob(state, sft_data(6), "cross_entropy"))
    trainer.optim_step(state, AdamParams(learning_rate=0.1))
    assert torch.equal(snapshot.params, before)
    assert not torch.equal(state.adapter.params, before)


def test_steps_without_a_snapshot_in_between_work_in_place(trainer: Trainer) -> None:
    state = trained_state(trainer)
    trainer.snapshot(state)
    trainer.optim_step(state, AdamParams())
    buffer = state.adapter.params.data_ptr()
    trainer.optim_step(state, AdamParams())
    assert state.adapter.params.data_ptr() == buffer


def test_a_fresh_adapter_changes_nothing_and_its_seed_decides_it(
    trainer: Trainer, model: Transformer
) -> None:
    first, second = (trainer.create(LoraConfig(rank=4, seed=5)) for _ in range(2))
    assert torch.equal(first.adapter.params, second.adapter.params)
    datum = sft_data(6)[0]
    logprobs = run_one(trainer, TrainJob(first, [datum], "cross_entropy")).loss_fn_outputs[0]["logprobs"]
    state = trainer.create(LoraConfig(rank=2, seed=9))
    np.testing.assert_allclose(
        logprobs.to_numpy(), naive_logprobs(model, state, datum).detach().numpy(), rtol=1e-5
    )


def test_an_absurd_rank_is_rejected(trainer: Trainer) -> None:
    with pytest.raises(InvalidInput, match="rank"):
        trainer.create(LoraConfig(rank=MAX_RANK + 1))


def test_train_flags_decide_what_has_parameters(trainer: Trainer) -> None:
    state = trainer.create(LoraConfig(rank=2, train_mlp=False, train_unembed=False))
    assert {slot.module for slot in state.adapter.layout.slots} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    run_one(trainer, TrainJob(state, sft_data(6), "cross_entropy"))
    assert state.grad is not None


def test_save_and_load_continue_as_if_nothing_had_happened(trainer: Trainer, tmp_path: Path) -> None:
    job = TrainJob(trainer.create(LoraConfig(rank=4, seed=0)), sft_data(9, 5), "cross_entropy")
    step = AdamParams(learning_rate=1e-2, weight_decay=0.1)
    for _ in range(2):
        run_one(trainer, job)
        trainer.optim_step(job.state, step)
    trainer.save(job.state, tmp_path / "saved", "tiny", optimizer=True)
    resumed = TrainJob(trainer.create(LoraConfig(rank=4, seed=1)), job.data, "cross_entropy")
    run_one(trainer, resumed)
    trainer.load(resumed.state, tmp_path / "saved", optimizer=True)
    assert resumed.state.grad is None
    assert resumed.state.step == 2
    for _ in range(2):
        assert run_one(trainer, job).metrics == run_one(trainer, resumed).metrics
        assert trainer.optim_step(job.state, step) == trainer.optim_step(resumed.state, step)
        assert torch.equal(job.state.adapter.params, resumed.state.adapter.params)


@pytest.mark.slow
def test_buffers_used_again_change_no_number(model: Transformer) -> None:
    def numbers(trainer: Trainer) -> list[float]:
        state = trained_state(trainer)
        seen = []
        for seed in range(3):
            for _ in range(2):  # the second pass adds to the gradient of the first
                run_one(trainer, TrainJob(state, sft_data(7, 4, seed=seed), "cross_entropy"))
            failed = trainer.run([TrainJob(state, [overflowing()], "importance_sampling")])
            assert isinstance(failed[0], NumericalError)
            seen.append(trainer.optim_step(state, AdamParams())["unclipped_grad_l2:mean"])
        return seen

    trainer = Trainer(model)
    assert numbers(trainer) == numbers(trainer) == numbers(Trainer(model))
