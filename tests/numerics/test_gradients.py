"""Gradients of adapters through the whole model: against finite differences and a naive reference, in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.engine.trainer.harness import (
    VOCAB,
    in_double,
    naive_logprobs,
    naive_loss,
    random_datum,
    run_one,
    sequence,
    sft_datum,
    small_transformer,
    trained_state,
)
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.head import Head
from tinkex.engine.trainer.losses import LOSSES
from tinkex.engine.trainer.trainer import Trainer, TrainJob, TrainState
from tinkex.types.inputs import Datum, ModelInput


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small_transformer(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def double(model: Transformer) -> Transformer:
    return in_double(model)


def gradient_of(
    trainer: Trainer, state: TrainState, data: list[Datum], loss_fn: str = "cross_entropy"
) -> np.ndarray:
    state.grad = None
    run_one(trainer, TrainJob(state, data, loss_fn))
    assert state.grad is not None
    return state.grad.numpy().copy()


def data_for(loss_fn: str, *lengths: int, seed: int = 0) -> list[Datum]:
    random = np.random.default_rng(seed)
    return [random_datum(loss_fn, random, length) for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tie"), [("llama", True), ("qwen2", True), ("qwen3", False)])
def test_cross_entropy_gradients_equal_finite_differences(
    family: str, tie: bool, tmp_path: pytest.TempPathFactory
) -> None:
    double = in_double(small_transformer(tmp_path, family=family, tie=tie))
    trainer = Trainer(double)
    state = trained_state(trainer, dtype=torch.float64)
    data = data_for("cross_entropy", 7, 5)
    gradient = gradient_of(trainer, state, data)
    origin, step = state.adapter.params.clone(), 1e-6

    def loss_at(params: torch.Tensor) -> float:
        state.adapter = state.adapter.with_params(params)
        with torch.no_grad():
            return sum(float(naive_loss("cross_entropy", naive_logprobs(double, state, d), d)) for d in data)

    random = np.random.default_rng(0)
    # Two parameters of every A and B, and a random direction through all of them.
    starts = [start for slot in state.adapter.layout.slots for start in (slot.a_offset, slot.b_offset)]
    for index in sorted({start + offset for start in starts for offset in (0, 11)}):
        moved = torch.zeros_like(origin)
        moved[index] = step
        slope = (loss_at(origin + moved) - loss_at(origin - moved)) / (2 * step)
        assert gradient[index] == pytest.approx(slope, rel=1e-5, abs=1e-7), index
    direction = torch.from_numpy(random.normal(size=len(origin)))
    slope = (loss_at(origin + step * direction) - loss_at(origin - step * direction)) / (2 * step)
    assert float(gradient @ direction.numpy()) == pytest.approx(slope, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_every_loss_trains_like_its_naive_reference(double: Transformer, loss_fn: str) -> None:
    trainer = Trainer(double)
    state = trained_state(trainer, dtype=torch.float64)
    data = data_for(loss_fn, 9, 4, 9, 13)
    leaf = state.adapter.params.clone().requires_grad_()
    logprobs = [naive_logprobs(double, state, datum, leaf) for datum in data]
    total = sum(naive_loss(loss_fn, lp, datum) for lp, datum in zip(logprobs, data, strict=True))
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert leaf.grad is not None

    output = run_one(trainer, TrainJob(state, data, loss_fn))

    assert state.grad is not None
    # The trainer holds thresholds and ratios of sequences in fp32, the reference in fp64.
    np.testing.assert_allclose(state.grad.numpy(), leaf.grad.numpy(), rtol=1e-6, atol=3e-7)
    assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-6)
    for own, expected in zip(output.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_allclose(own["logprobs"].to_numpy(), expected.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_fp32_gradients_are_those_of_fp64_rounded(
    model: Transformer, double: Transformer, loss_fn: str
) -> None:
    data = data_for(loss_fn, 9, 4, 13)
    single = gradient_of(Trainer(model), trained_state(Trainer(model)), data, loss_fn)
    exact = gradient_of(Trainer(double), trained_state(Trainer(double), dtype=torch.float64), data, loss_fn)
    assert np.linalg.norm(single - exact) <= 1e-5 * np.linalg.norm(exact)


def test_many_targets_per_position_train_like_their_naive_reference(double: Transformer) -> None:
    random = np.random.default_rng(3)
    targets, weights = random.integers(0, VOCAB, (6, 3)), random.normal(size=(6, 3))
    weights[2] = 0
    tokens = sequence(random, 6)[:-1]
    sparse = torch.tensor(weights * (random.random((6, 3)) < 0.2))
    data = [
        Datum(
            model_input=ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": targets, "weights": weights},
        ),
        Datum(
            model_input=ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": torch.from_numpy(targets), "weights": sparse},
        ),
        sft_datum(sequence(random, 4)),
    ]
    assert data[1].loss_fn_inputs["weights"].is_sparse
    trainer = Trainer(double)
    state = trained_state(trainer, dtype=torch.float64)
    leaf = state.adapter.params.clone().requires_grad_()
    total = sum(naive_loss("cross_entropy", naive_logprobs(double, state, d, leaf), d) for d in data)
    assert isinstance(total, torch.Tensor)
    total.backward()
    output = run_one(trainer, TrainJob(state, data, "cross_entropy"))
    assert state.grad is not None
    assert leaf.grad is not None
    np.testing.assert_allclose(state.grad.numpy(), leaf.grad.numpy(), rtol=1e-6, atol=1e-9)
    assert output.loss_fn_outputs[0]["logprobs"].shape == [6, 3]
    assert output.loss_fn_outputs[2]["logprobs"].shape == [4]


@pytest.mark.parametrize("flags", ["train_attn", "train_mlp", "train_unembed"])
def test_one_trained_part_gets_the_gradient_it_has_among_all(double: Transformer, flags: str) -> None:
    trainer = Trainer(double)
    only = {name: name == flags for name in ("train_attn", "train_mlp", "train_unembed")}
    state = trained_state(trainer, dtype=torch.float64, **only)
    data = data_for("cross_entropy", 8, 3)
    leaf = state.adapter.params.clone().requires_grad_()
    total = sum(naive_loss("cross_entropy", naive_logprobs(double, state, d, leaf), d) for d in data)
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(gradient_of(trainer, state, data), leaf.grad.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
        ("ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 30.0}),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("dro", {"beta": 0.7}),
        ("gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 30.0}),
    ],
)
def test_settings_of_a_loss_train_like_its_naive_reference(
    double: Transformer, loss_fn: str, config: dict[str, float]
) -> None:
    trainer = Trainer(double)
    state = trained_state(trainer, dtype=torch.float64)
    data = data_for(loss_fn, 9, 4, 13)
    leaf = state.adapter.params.clone().requires_grad_()
    total = sum(naive_loss(loss_fn, naive_logprobs(double, state, d, leaf), d, **config) for d in data)
    assert isinstance(total, torch.Tensor)
    total.backward()
    output = run_one(trainer, TrainJob(state, data, loss_fn, config))
    assert state.grad is not None
    assert leaf.grad is not None
    # The trainer holds thresholds in fp32, the reference in fp64.
    np.testing.assert_allclose(state.grad.numpy(), leaf.grad.numpy(), rtol=1e-6, atol=1e-6)
    assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-6, abs=1e-6)
    by_default = gradient_of(trainer, state, data, loss_fn)
    assert np.linalg.norm(by_default - leaf.grad.numpy()) > 1e-3 * np.linalg.norm(by_default)


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_thresholds_of_single_tokens_win_over_the_settings(double: Transformer, loss_fn: str) -> None:
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    plain = data_for(loss_fn, 9, 4)
    carrying = [
        Datum(
            model_input=datum.model_input,
            loss_fn_inputs={
                **datum.loss_fn_inputs,
                **{
                    name: np.full(datum.model_input.length, bound, np.float32)
                    for name, bound in bounds.items()
                },
            },
        )
        for datum in plain
    ]
    trainer = Trainer(double)
    per_token, by_setting = (trained_state(trainer, dtype=torch.float64) for _ in range(2))
    run_one(trainer, TrainJob(per_token, carrying, loss_fn, {"clip_high_threshold": 9.0}))
    run_one(trainer, TrainJob(by_setting, plain, loss_fn, bounds))
    assert per_token.grad is not None
    assert by_setting.grad is not None
    assert torch.equal(per_token.grad, by_setting.grad)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_a_split_batch_has_the_gradient_of_the_whole(model: Transformer, loss_fn: str) -> None:
    data = data_for(loss_fn, 9, 4, 13, 20, 1)
    whole_trainer, split_trainer = Trainer(model), Trainer(model, max_tokens_per_pass=16)
    whole = gradient_of(whole_trainer, trained_state(whole_trainer), data, loss_fn)
    split = gradient_of(split_trainer, trained_state(split_trainer), data, loss_fn)
    assert np.linalg.norm(split - whole) <= 1e-5 * np.linalg.norm(whole)


def test_tenants_who_share_a_pass_get_the_gradients_they_get_alone(model: Transformer) -> None:
    trainer = Trainer(model)
    losses = ["cross_entropy", "ppo", "gspo", "dro"]
    jobs = [
        TrainJob(trained_state(trainer, seed=n, rank=2 + n), data_for(loss_fn, 6, 9, seed=n), loss_fn)
        for n, loss_fn in enumerate(losses)
    ]
    together = trainer.run(jobs)
    gradients = [job.state.grad for job in jobs]
    for job, output, gradient in zip(jobs, together, gradients, strict=True):
        job.state.grad = None
        alone = run_one(trainer, job)
        assert not isinstance(output, Exception)
        assert gradient is not None
        assert job.state.grad is not None
        assert output.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=1e-5)
        assert float((gradient - job.state.grad).norm()) <= 1e-5 * float(gradient.norm())


def test_logits_in_small_chunks_give_the_gradient_of_a_single_chunk(double: Transformer) -> None:
    data = data_for("cross_entropy", 9, 4, 13)
    gradients = []
    for max_rows in (3, 1000):
        trainer = Trainer(double, head=Head(double.unembedding_VD, max_rows=max_rows))
        gradients.append(gradient_of(trainer, trained_state(trainer, dtype=torch.float64), data))
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-8, atol=1e-12)


def test_gradients_of_several_calls_add_up(model: Transformer) -> None:
    trainer = Trainer(model)
    state = trained_state(trainer)
    first, second = data_for("cross_entropy", 6, 9), data_for("cross_entropy", 5, seed=1)
    separate = gradient_of(trainer, state, first) + gradient_of(trainer, state, second)
    state.grad = None
    for data in (first, second):
        run_one(trainer, TrainJob(state, data, "cross_entropy"))
    assert state.grad is not None
    np.testing.assert_allclose(state.grad.numpy(), separate, rtol=1e-5, atol=1e-7)
