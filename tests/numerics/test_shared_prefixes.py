"""Datums that share prefixes train as they do alone: against a naive float64 reference, and against passes without sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.engine.trainer.graphs import traced
from tests.unit.engine.trainer.harness import (
    VOCAB,
    in_double,
    naive_logprobs,
    naive_loss,
    small_transformer,
    trained_state,
)
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.losses import LOSSES
from tinkex.engine.trainer.trainer import Trainer, TrainJob, TrainState
from tinkex.errors import NumericalError
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.losses import ForwardBackwardOutput

pytestmark = pytest.mark.slow

TWO_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
FORESTS = st.lists(TWO_TOKENS, min_size=1, max_size=8)
"""Sequences of two different tokens have prefixes of all lengths in common, and copies."""
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small_transformer(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def double(model: Transformer) -> Transformer:
    return in_double(model)


def datum_of(tokens: list[int], random: np.random.Generator, loss_fn: str = "cross_entropy") -> Datum:
    """A datum with everything a loss reads, also on the tokens that it may share with others."""
    length = len(tokens)
    inputs: dict[str, Any] = {"target_tokens": random.integers(0, VOCAB, length)}
    if loss_fn == "cross_entropy":
        inputs["weights"] = np.where(random.random(length) < 0.7, random.normal(size=length), 0.0)
    else:
        inputs["logprobs"] = random.normal(-np.log(VOCAB), 0.5, length)
        inputs["advantages"] = np.where(random.random(length) < 0.7, random.normal(size=length), 0.0)
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = np.ones(length, dtype=np.float32)
    return Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def trained(trainer: Trainer, jobs: list[TrainJob], *, share: bool = True) -> list[ForwardBackwardOutput]:
    outputs = trainer.run(jobs, share_prefixes=share)
    for output in outputs:
        assert isinstance(output, ForwardBackwardOutput), output
    return outputs  # type: ignore[return-value]  # checked above


def gradient(state: TrainState) -> np.ndarray:
    assert state.grad is not None
    return state.grad.numpy()


def check_against_the_reference(
    double: Transformer, trainer: Trainer, jobs: list[tuple[TrainState, list[Datum], str]]
) -> None:
    """Compares the outputs and gradients of jobs that run together with those of each datum alone."""
    leaves = {id(state): state.adapter.params.clone().requires_grad_() for state, _, _ in jobs}
    expected = []
    for state, data, loss_fn in jobs:
        logprobs = [naive_logprobs(double, state, datum, leaves[id(state)]) for datum in data]
        total = torch.stack([naive_loss(loss_fn, lp, d) for lp, d in zip(logprobs, data, strict=True)]).sum()
        total.backward()
        expected.append((total.item(), [lp.detach().numpy() for lp in logprobs]))
    for state, _, _ in jobs:
        state.grad = None
    outputs = trained(trainer, [TrainJob(*job) for job in jobs])
    for output, (loss, logprobs) in zip(outputs, expected, strict=True):
        assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
        for own, theirs in zip(output.loss_fn_outputs, logprobs, strict=True):
            np.testing.assert_allclose(own["logprobs"].to_numpy(), theirs, rtol=1e-6)
    for state, _, _ in jobs:
        # The trainer holds thresholds and ratios of sequences in fp32, the reference in fp64.
        own_leaf = leaves[id(state)].grad
        assert own_leaf is not None
        np.testing.assert_allclose(gradient(state), own_leaf.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@MANY
@given(FORESTS, st.integers(0, 2**32), st.sampled_from([3, 11, 1000]), st.sampled_from([1, 4]))
def test_random_forests_equal_a_float64_reference(
    double: Transformer, forest: list[list[int]], seed: int, budget: int, min_saved: int
) -> None:
    random = np.random.default_rng(seed)
    trainer = Trainer(double, max_tokens_per_pass=budget, min_saved=min_saved)
    state = trained_state(trainer, dtype=torch.float64)
    data = [datum_of(tokens, random) for tokens in forest]
    check_against_the_reference(double, trainer, [(state, data, "cross_entropy")])


@pytest.mark.slow
@MANY
@given(st.lists(FORESTS, min_size=2, max_size=4), st.integers(0, 2**32), st.data())
def test_jobs_of_several_tenants_equal_a_float64_reference(
    double: Transformer, forests: list[list[list[int]]], seed: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    trainer = Trainer(double, max_tokens_per_pass=40, min_saved=1)
    states = [trained_state(trainer, seed=n, dtype=torch.float64) for n in range(2)]
    jobs = []
    for forest in forests:
        loss_fn = data.draw(st.sampled_from(sorted(LOSSES)))
        state = states[data.draw(st.integers(0, 1))]
        jobs.append((state, [datum_of(tokens, random, loss_fn) for tokens in forest], loss_fn))
    check_against_the_reference(double, trainer, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_fp32_numbers_equal_those_without_sharing_up_to_rounding(model: Transformer, loss_fn: str) -> None:
    random = np.random.default_rng(5)
    prompt = random.integers(0, VOCAB, 20).tolist()
    data = [
        datum_of([*prompt, *random.integers(0, VOCAB, length).tolist()], random, loss_fn)
        for length in (3, 9, 9, 1, 14)
    ]
    trainer = Trainer(model)
    shared, alone = trained_state(trainer), trained_state(trainer)
    job, reference = TrainJob(shared, data, loss_fn), TrainJob(alone, data, loss_fn)
    [output] = trained(trainer, [job])
    [expected] = trained(trainer, [reference], share=False)
    assert job.effort.tokens_computed == 20 + 3 + 9 + 9 + 1 + 14
    assert reference.effort.tokens_computed == sum(datum.model_input.length for datum in data)
    assert output.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    for own, theirs in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(own["logprobs"].to_numpy(), theirs["logprobs"].to_numpy(), atol=2e-6)
    difference = np.linalg.norm(gradient(shared) - gradient(alone))
    assert difference <= 1e-5 * np.linalg.norm(gradient(alone))


def grouped(random: np.random.Generator, loss_fn: str = "cross_entropy") -> list[Datum]:
    """A prompt of 12 tokens with three answers, one of them continued."""
    prompt = random.integers(0, VOCAB, 12).tolist()
    ends = [random.integers(0, VOCAB, n).tolist() for n in (4, 5, 6)]
    return [datum_of([*prompt, *end], random, loss_fn) for end in (*ends, [*ends[2], 7, 8, 9])]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_family_shares_prefixes_also_with_a_window_shorter_than_they_are(
    family: str, tmp_path: Path
) -> None:
    config = {"sliding_window": 6} if family == "mistral" else None
    double = in_double(small_transformer(tmp_path, family=family, config=config))
    trainer = Trainer(double)
    state = trained_state(trainer, dtype=torch.float64)
    data = grouped(np.random.default_rng(1))
    check_against_the_reference(double, trainer, [(state, data, "cross_entropy")])


def test_many_targets_on_shared_tokens_are_summed(double: Transformer) -> None:
    random = np.random.default_rng(2)
    tokens = random.integers(0, VOCAB, 12).tolist()
    data = [
        Datum(
            model_input=ModelInput.from_ints(tokens[:length]),
            loss_fn_inputs={
                "target_tokens": random.integers(0, VOCAB, (length, width)),
                "weights": random.normal(size=(length, width)),
            },
        )
        for length, width in ((12, 3), (12, 1), (9, 2))
    ]
    trainer = Trainer(double)
    state = trained_state(trainer, dtype=torch.float64)
    check_against_the_reference(double, trainer, [(state, data, "cross_entropy")])


def test_recomputed_layers_of_a_shared_prefix_train_the_same(double: Transformer) -> None:
    trainer = Trainer(double, max_tokens_per_pass=8)  # every datum is longer
    state = trained_state(trainer, dtype=torch.float64)
    data = grouped(np.random.default_rng(3))
    check_against_the_reference(double, trainer, [(state, [*data, *data], "cross_entropy")])
    job = TrainJob(state, data[:3], "cross_entropy")
    trained(trainer, [job])
    assert job.effort.tokens_computed == 12 + 4 + 5 + 6


def test_custom_losses_share_prefixes(model: Transformer) -> None:
    random = np.random.default_rng(4)
    graph = traced(lambda logprobs, weights: (-(logprobs * weights).sum(), {}), logprobs=1, weights=1)
    data = grouped(random)
    trainer = Trainer(model)
    custom, reference = trained_state(trainer), trained_state(trainer)
    trained(trainer, [TrainJob(custom, data, "custom", custom_loss=graph)])
    trained(trainer, [TrainJob(reference, data, "cross_entropy")], share=False)
    difference = np.linalg.norm(gradient(custom) - gradient(reference))
    assert difference <= 1e-5 * np.linalg.norm(gradient(reference))


def test_a_job_that_fails_leaves_those_it_would_share_with_as_if_it_were_not_there(
    model: Transformer,
) -> None:
    random = np.random.default_rng(6)
    trainer = Trainer(model)
    prompt = random.integers(0, VOCAB, 12).tolist()
    good, bad = (datum_of([*prompt, *range(n)], random, "importance_sampling") for n in (3, 5))
    far = np.full(17, -1e4, dtype=np.float32)
    bad = Datum(
        model_input=bad.model_input,
        loss_fn_inputs={**bad.loss_fn_inputs, "logprobs": far, "advantages": np.ones(17, dtype=np.float32)},
    )
    state, alone = trained_state(trainer), trained_state(trainer)
    failed, output = trainer.run(
        [TrainJob(state, [bad], "importance_sampling"), TrainJob(state, [good], "importance_sampling")]
    )
    [expected] = trained(trainer, [TrainJob(alone, [good], "importance_sampling")])
    assert isinstance(failed, NumericalError)
    assert isinstance(output, ForwardBackwardOutput)
    assert output.metrics == expected.metrics
    np.testing.assert_array_equal(gradient(state), gradient(alone))


def test_with_deterministic_a_job_gives_the_same_bits_beside_any_other(model: Transformer) -> None:
    trainer = Trainer(model, deterministic=True)
    data = grouped(np.random.default_rng(7))
    beside, alone = trained_state(trainer), trained_state(trainer)
    [output, _] = trained(
        trainer, [TrainJob(beside, data, "cross_entropy"), TrainJob(beside, data[:2], "cross_entropy")]
    )
    [expected] = trained(trainer, [TrainJob(alone, data, "cross_entropy")])
    trained(trainer, [TrainJob(alone, data[:2], "cross_entropy")])
    assert output.metrics == expected.metrics
    np.testing.assert_array_equal(gradient(beside), gradient(alone))


def test_a_forward_pass_shares_prefixes_and_leaves_no_gradient(double: Transformer) -> None:
    trainer = Trainer(double)
    state = trained_state(trainer, dtype=torch.float64)
    data = grouped(np.random.default_rng(8))
    job = TrainJob(state, data, "cross_entropy", backward=False)
    [output] = trained(trainer, [job])
    assert state.grad is None
    assert job.effort.tokens_computed < sum(datum.model_input.length for datum in data)
    for own, datum in zip(output.loss_fn_outputs, data, strict=True):
        expected = naive_logprobs(double, state, datum)
        np.testing.assert_allclose(own["logprobs"].to_numpy(), expected.detach().numpy(), rtol=1e-6)
