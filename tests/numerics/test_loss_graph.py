"""Uploaded losses compute what the function they were traced from computes, and train like it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 -- as everyone writes it

from tests.unit.engine.trainer.graphs import traced
from tests.unit.engine.trainer.harness import (
    VOCAB,
    in_double,
    naive_logprobs,
    random_datum,
    run_one,
    sequence,
    small_transformer,
    trained_state,
)
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.trainer import Trainer, TrainJob
from tinkex.losses.custom import SURROGATE, data_for_logprobs, differentiate
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.tensors import TensorData

pytestmark = pytest.mark.slow

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small_transformer(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def double(model: Transformer) -> Transformer:
    return in_double(model)


# What users write: each takes the logprobs and two more inputs of one datum.


def policy_gradient(logprobs: Tensor, q: Tensor, a: Tensor) -> Any:
    ratio = torch.exp(logprobs - q)
    clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    loss = -torch.min(ratio * a, clipped * a).sum()
    return loss, {"custom/clipped:mean": (ratio != clipped).float().mean(), "custom/a:sum": a.sum()}


def divergence_penalty(logprobs: Tensor, q: Tensor, a: Tensor) -> Any:
    log_ratio = q - logprobs
    k3 = torch.expm1(log_ratio) - log_ratio
    mask = a != 0
    mean = (k3 * mask).sum() / mask.sum().clamp(min=1)
    return -(logprobs * a).sum() + 0.1 * mean, {"custom/kl:mean": k3.detach().mean()}


def sequence_ratio(logprobs: Tensor, q: Tensor, a: Tensor) -> Any:
    length = logprobs.shape[0]
    ratio = ((logprobs - q).sum() / length).exp()
    loss = -(ratio * a.mean() * math.sqrt(2)) * logprobs.size(0)
    return loss, {"custom/ratio:mean": ratio.detach()}


def masked_rows(logprobs: Tensor, q: Tensor, a: Tensor) -> Any:
    picked = logprobs[a > 0]
    rest = torch.where(a > 0, torch.zeros_like(logprobs), logprobs)
    best = torch.cat([logprobs[:1], logprobs[-1:]]).max(dim=0).values
    return picked.sum() * 2 - rest[..., 1:].pow(2).mean() + best, {"custom/picked:sum": (a > 0).sum()}


def smooth(logprobs: Tensor, q: Tensor, a: Tensor) -> Any:
    q = q.to(logprobs.dtype)
    pairs = torch.stack((logprobs, q), dim=-1)
    soft = F.softmax(pairs, dim=-1)[:, 0] + F.log_softmax(pairs, -1)[:, 1] + torch.logsumexp(pairs, dim=-1)
    gates = (
        F.softplus(logprobs) + F.logsigmoid(q * logprobs) + F.gelu(logprobs) + F.silu(a) + F.relu(-logprobs)
    )
    losses = (
        F.mse_loss(logprobs, q)
        + F.huber_loss(logprobs, q, reduction="sum")
        + F.kl_div(logprobs, q.exp(), reduction="sum")
    )
    return (soft + gates).sum() + losses, {}


def shapes(logprobs: Tensor, q: Tensor, a: Tensor) -> Any:
    q, a = q.type_as(logprobs), a.to(logprobs.dtype)
    column = logprobs.unsqueeze(1)
    margins = (column - logprobs[None, :]).tril(-1)
    later = torch.cumsum(logprobs, dim=0).flip(0)
    windows = F.pad(logprobs, (2, 0)).unfold(0, 3, 1).mean(dim=1, keepdim=True).squeeze(1)
    product = torch.einsum("i,i->", logprobs, a) + (column @ q.view(1, -1)).diagonal().sum()
    norms = torch.norm(logprobs) + logprobs.norm(p=2) + torch.linalg.vector_norm(windows)
    return torch.sigmoid(margins).sum() + (later * a).sum() + product + norms, {
        "custom/n:sum": a.sum() * 0 + a.numel()
    }


def types(logprobs: Tensor, q: Tensor, a: Tensor) -> Any:
    precise = logprobs.to(torch.float64) - q.double()
    whole = (a * 10).long() % 3
    flags = ~(whole == 0) & (a < 1) | (q.detach() > 5)
    weights = flags.type_as(logprobs) + torch.full_like(logprobs, 0.5) + logprobs.new_ones(logprobs.shape)
    return (precise * weights).sum() / (2**weights).sum() + abs(-logprobs).mean() + (a // 1).sum(), {
        "custom/f:mean": flags.sum()
    }


LOSSES: list[Loss] = [policy_gradient, divergence_penalty, sequence_ratio, masked_rows, smooth, shapes, types]


def inputs(random: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    return {
        "q": random.normal(-3, 0.5, length).astype(np.float32),
        "a": (random.normal(size=length) * (random.random(length) < 0.7)).astype(np.float32),
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_a_graph_gives_the_numbers_of_its_function(loss: Loss) -> None:
    graph = traced(loss, logprobs=1, q=1, a=1)
    random = np.random.default_rng(5)
    for length in (4, 33):
        tensors = [torch.from_numpy(array) for array in inputs(random, length).values()]
        logprobs = torch.from_numpy(random.normal(-3, 1, length)).requires_grad_()
        expected, metrics = loss(logprobs, *tensors)
        (gradient,) = torch.autograd.grad(expected, logprobs)
        result = graph.evaluate(logprobs, tensors, backward=True)
        assert result.loss == expected.item()
        assert result.metrics == {name: float(value) for name, value in metrics.items()}
        assert result.gradient is not None
        assert torch.equal(result.gradient, gradient)


def datums(random: np.random.Generator, *lengths: int) -> list[Datum]:
    return [
        Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], **inputs(random, length)},
        )
        for length in lengths
        for tokens in [sequence(random, length)]
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_custom_loss_trains_like_autograd_through_the_whole_model_in_fp64(
    double: Transformer, loss: Loss
) -> None:
    trainer = Trainer(double)
    state = trained_state(trainer, dtype=torch.float64)
    data = datums(np.random.default_rng(1), 9, 4, 13)
    leaf = state.adapter.params.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for datum in data:
        lp = naive_logprobs(double, state, datum, leaf)
        total = total + loss(lp, *(datum.loss_fn_inputs[name].to_torch() for name in ("q", "a")))[0]
    total.backward()
    assert leaf.grad is not None

    graph = traced(loss, logprobs=1, q=1, a=1)
    output = run_one(trainer, TrainJob(state, data, "custom", custom_loss=graph))

    assert state.grad is not None
    np.testing.assert_allclose(state.grad.numpy(), leaf.grad.numpy(), rtol=1e-6, atol=1e-9)
    assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_server_and_the_client_side_of_a_custom_loss_agree(model: Transformer, loss: Loss) -> None:
    trainer = Trainer(model)
    data = datums(np.random.default_rng(2), 9, 4, 13)

    def over_the_batch(batch: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        per_datum = [
            loss(lp, *(datum.loss_fn_inputs[name].to_torch() for name in ("q", "a")))[0]
            for datum, lp in zip(batch, logprobs, strict=True)
        ]
        return torch.stack(per_datum).sum(), {}

    client = trained_state(trainer)
    forward = run_one(trainer, TrainJob(client, data_for_logprobs(data), SURROGATE, backward=False))
    surrogate = differentiate(data, forward, over_the_batch)
    run_one(trainer, TrainJob(client, surrogate.data, SURROGATE))

    server = trained_state(trainer)
    graph = traced(loss, logprobs=1, q=1, a=1)
    run_one(trainer, TrainJob(server, data, "custom", custom_loss=graph))

    assert client.grad is not None
    assert server.grad is not None
    assert float((client.grad - server.grad).norm()) <= 1e-5 * float(client.grad.norm())


def test_many_targets_scalars_and_sparse_inputs_reach_the_graph(double: Transformer) -> None:
    def distil(logprobs: Tensor, teacher: Tensor, strength: Tensor, target_tokens: Tensor) -> Any:
        counted = (target_tokens > 0).to(logprobs.dtype)
        return -(strength * counted * teacher * logprobs).sum(), {"custom/strength:mean": strength}

    random = np.random.default_rng(4)
    targets = random.integers(0, VOCAB, (6, 3))
    teacher = random.random((6, 3)).astype(np.float32)
    sparse = TensorData.from_torch_sparse(torch.from_numpy(teacher * (random.random((6, 3)) < 0.2)))
    tokens = sequence(random, 6)[:-1]
    data = [
        Datum(
            model_input=ModelInput.from_ints(tokens),
            loss_fn_inputs={
                "target_tokens": targets,
                "teacher": given,
                "strength": np.array(strength, dtype=np.float32),
            },
        )
        for given, strength in ((teacher, 0.5), (sparse, 2.0))
    ]
    assert data[1].loss_fn_inputs["teacher"].is_sparse
    trainer = Trainer(double)
    state = trained_state(trainer, dtype=torch.float64)
    leaf = state.adapter.params.clone().requires_grad_()
    names = ("teacher", "strength", "target_tokens")
    total = torch.zeros((), dtype=torch.float64)
    for datum in data:
        lp = naive_logprobs(double, state, datum, leaf)
        total = total + distil(lp, *(datum.loss_fn_inputs[name].to_torch() for name in names))[0]
    total.backward()
    assert leaf.grad is not None

    graph = traced(distil, logprobs=2, teacher=2, strength=0, target_tokens=2)
    output = run_one(trainer, TrainJob(state, data, "custom", custom_loss=graph))

    assert state.grad is not None
    np.testing.assert_allclose(state.grad.numpy(), leaf.grad.numpy(), rtol=1e-6, atol=1e-9)
    assert output.metrics["custom/strength:mean"] == 1.25
    assert output.loss_fn_outputs[0]["logprobs"].shape == [6, 3]


@pytest.mark.slow
def test_a_split_batch_has_the_custom_gradient_of_the_whole(model: Transformer) -> None:
    graph = traced(policy_gradient, logprobs=1, q=1, a=1)
    gradients = []
    for budget in (2048, 16):
        trainer = Trainer(model, max_tokens_per_pass=budget)
        state = trained_state(trainer)
        run_one(
            trainer,
            TrainJob(state, datums(np.random.default_rng(0), 9, 4, 13, 20), "custom", custom_loss=graph),
        )
        assert state.grad is not None
        gradients.append(state.grad)
    assert float((gradients[0] - gradients[1]).norm()) <= 1e-5 * float(gradients[0].norm())


def test_a_loss_the_engine_has_is_the_same_written_by_a_user(model: Transformer) -> None:
    def ppo(logprobs: Tensor, advantages: Tensor, sampled: Tensor) -> Any:
        ratio = torch.exp(torch.where(advantages == 0, 0.0, logprobs - sampled))
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum(), {}

    trainer = Trainer(model)
    random = np.random.default_rng(6)
    data = [random_datum("ppo", random, length) for length in (8, 12)]
    renamed = [
        Datum(
            model_input=datum.model_input,
            loss_fn_inputs={**datum.loss_fn_inputs, "sampled": datum.loss_fn_inputs["logprobs"]},
        )
        for datum in data
    ]
    built_in, uploaded = trained_state(trainer), trained_state(trainer)
    expected = run_one(trainer, TrainJob(built_in, data, "ppo"))
    graph = traced(ppo, logprobs=1, advantages=1, sampled=1)
    output = run_one(trainer, TrainJob(uploaded, renamed, "custom", custom_loss=graph))
    assert built_in.grad is not None
    assert uploaded.grad is not None
    assert float((built_in.grad - uploaded.grad).norm()) <= 1e-5 * float(built_in.grad.norm())
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5, abs=1e-5)
