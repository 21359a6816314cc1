"""The KL penalty of GRPO: its formula, its gradient, and what it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from tests.unit.train.test_runs import MODEL, service, take
from tinkex import train, types
from tinkex.train.grpo import Grpo
from tinkex.train.recipes import PreparedStep, RunContext
from tinkex.train.rendering import Renderer

__all__ = ["service"]

pytestmark = pytest.mark.slow

BETA = 0.3
ADAM = types.AdamParams(learning_rate=0.01)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(3)))
    return file


def grpo(prompts: Path, output: Path, **more: Any) -> train.GrpoSettings:
    given = {"model": MODEL, "rank": 4, "learning_rate": 0.01, "batch_size": 3, "reward_regex": "[a-m]",
             "group_size": 4, "max_tokens": 4, "sample_tokens": 2, "eval_fraction": 0.0, **more}  # fmt: skip
    return train.GrpoSettings(data=prompts, output=output, **given)


def started(
    service: tinkex.ServiceClient, settings: train.GrpoSettings
) -> tuple[Grpo, RunContext, tinkex.TrainingClient]:
    training = service.create_lora_training_client(MODEL, rank=4, seed=5)
    renderer = Renderer(training.get_tokenizer())
    initial = service.create_sampling_client(base_model=MODEL)
    return (
        Grpo(settings, train.read_data(settings), renderer),
        RunContext(training, initial, renderer),
        training,
    )


def arrays(work: PreparedStep, name: str) -> list[np.ndarray]:
    return [datum.loss_fn_inputs[name].to_numpy() for data in work.passes for datum in data]


def test_every_token_has_the_advantage_of_the_formula(
    service: tinkex.ServiceClient, prompts: Path, tmp_path: Path
) -> None:
    plain, penalized = (grpo(prompts, tmp_path / "run", kl_coef=beta) for beta in (0.0, BETA))
    recipe, context, training = started(service, penalized)
    for step in (1, 2):  # away from the reference
        take(training, recipe.prepare(context, [[0, 1, 2]], step), ADAM)
    work = recipe.prepare(context, [[0, 1], [2]], 3)
    same = Grpo(plain, train.read_data(plain), context.renderer).prepare(context, [[0, 1], [2]], 3)
    assert "kl" not in same.metrics
    inputs = [datum.model_input.to_ints() for data in work.passes for datum in data]
    rewarded = {tuple(datum.model_input.to_ints()): datum.loss_fn_inputs["advantages"].to_numpy()
                for data in same.passes for datum in data}  # fmt: skip
    answers = [q != 0 for q in arrays(work, "logprobs")]  # the prompt's tokens have a logprob of 0
    targets = arrays(work, "target_tokens")
    gaps = []
    for tokens, target, q in zip(inputs, targets, arrays(work, "logprobs"), strict=True):
        whole = types.ModelInput.from_ints([*tokens, int(target[-1])])
        rho = np.array(context.initial.compute_logprobs(whole).result()[1:], dtype=np.float64)
        gaps.append(np.asarray(q, dtype=np.float64) - rho)
    assert len(inputs) == 12, "all answers are trained on, also those of groups with equal rewards"
    mean = np.concatenate([gap[own] for gap, own in zip(gaps, answers, strict=True)]).mean()
    assert work.metrics["kl"] == pytest.approx(mean, abs=1e-5)
    assert mean > 0.001
    for tokens, gap, own, found in zip(inputs, gaps, answers, arrays(work, "advantages"), strict=True):
        reward = rewarded.get(tuple(tokens), np.zeros(len(tokens)))
        expected = np.where(own, reward - BETA * (gap - mean) / 12, 0.0)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_the_gradient_is_that_of_the_penalty_written_with_torch(
    service: tinkex.ServiceClient, prompts: Path, tmp_path: Path
) -> None:
    import torch

    recipe, context, training = started(service, grpo(prompts, tmp_path / "run", kl_coef=BETA))
    other = service.create_lora_training_client(MODEL, rank=4, seed=5)
    for step in (1, 2, 3):
        work = recipe.prepare(context, [[0, 1, 2]], step)
        (data,) = work.passes
        # The advantages without the penalty, and the reference's logprobs, of the answers' tokens.
        plain, kl = [], work.metrics["kl"]
        for datum in data:
            q = torch.tensor(datum.loss_fn_inputs["logprobs"].to_numpy())
            whole = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])]
            rho = torch.tensor(
                context.initial.compute_logprobs(types.ModelInput.from_ints(whole)).result()[1:]
            )
            own = (q != 0).float()
            penalized = torch.tensor(datum.loss_fn_inputs["advantages"].to_numpy())
            plain.append((penalized + BETA * (q - rho - kl) / 12 * own, rho, own))

        def loss(_: Any, logprobs: list[torch.Tensor], plain: Any = plain, kl: float = kl) -> Any:
            total = torch.zeros(())
            for lp, (advantage, rho, own) in zip(logprobs, plain, strict=True):
                ratio = torch.exp(lp - lp.detach())
                penalty = 0.5 * (lp - rho) ** 2 - kl * lp  # its derivative by lp is δ − δ̄
                total = total - (ratio * advantage * own).sum() + BETA / 12 * (penalty * own).sum()
            return total, {}

        take(training, work, ADAM)
        other.forward_backward_custom(data, loss).result()
        other.optim_step(ADAM).result()
    found, wanted = (
        client.forward(data, "importance_sampling").result().loss_fn_outputs for client in (training, other)
    )
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), two["logprobs"].to_numpy(), atol=2e-3)


def test_a_penalty_keeps_the_model_near_where_it_started(
    service: tinkex.ServiceClient, prompts: Path, tmp_path: Path
) -> None:
    free, held = (
        train.run(service, grpo(prompts, tmp_path / f"{beta}", kl_coef=beta, steps=8)).metrics
        for beta in (1e-9, 2.0)
    )
    assert free[0]["kl"] == pytest.approx(0, abs=1e-4), "the model is its own reference at first"
    assert held[-1]["kl"] < 0.5 * free[-1]["kl"]


def test_rounding_is_not_a_distance_from_the_reference(
    service: tinkex.ServiceClient, prompts: Path, tmp_path: Path
) -> None:
    settings = grpo(prompts, tmp_path / "run", kl_coef=1.0, reward_regex="", steps=2)
    report = train.run(service, settings)
    assert [line["packing"] for line in report.metrics] == [[], []], "equal rewards, and no step away"
    assert report.samples[0]["before"] == report.samples[0]["after"]
