"""Whole runs of every recipe, on a served tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.servers import ServedEngine
from tinkex import train, types
from tinkex.config import Config
from tinkex.errors import ConfigError, SetupError
from tinkex.train.dpo import Dpo
from tinkex.train.recipes import Metrics, PreparedStep, RunContext
from tinkex.train.rendering import Renderer

pytestmark = pytest.mark.slow

MODEL = "tiny/llama"
ANSWERS = ("Paris.", "four.", "the sea.", "a fox.", "a dog.", "the sky.")


@pytest.fixture
def service(served_engine: ServedEngine) -> Iterator[tinkex.ServiceClient]:
    config = Config(base_url=served_engine.url, api_key=served_engine.key)
    with tinkex.ServiceClient(config=config) as client:
        yield client


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"Question {n}?", "completion": answer}) + "\n" for n, answer in enumerate(ANSWERS)
        )
    )  # fmt: skip
    return file


def sft(chats: Path, output: Path, **more: Any) -> train.SftSettings:
    given = {"model": MODEL, "rank": 4, "learning_rate": 0.01, "batch_size": 2, "sample_tokens": 4, **more}
    return train.SftSettings(data=chats, output=output, **given)


def losses(report: train.TrainingReport) -> list[float]:
    return [round(value, 4) for value in report.curve]


def test_a_supervised_run_learns_evaluates_saves_and_reports(
    service: tinkex.ServiceClient, chats: Path, tmp_path: Path
) -> None:
    settings = sft(chats, tmp_path / "run", epochs=4, eval_fraction=0.2, save_every=4, train_on="all")
    report = train.run(service, settings)
    assert report.curve[-1] < 0.8 * report.curve[0]
    assert [step for step, _ in report.evaluations] == [0, 3, 6, 9, 12]
    assert report.evaluations[-1][1] < report.evaluations[0][1]
    assert len(report.samples) == 3
    kept = json.loads((tmp_path / "run" / "report.json").read_text())
    assert kept["checkpoint"] == report.checkpoint
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "run" / "report.txt").read_text()
    for part in ("loss per step", "Before", "After", report.sampler_checkpoint):
        assert part in text
    rest = service.create_rest_client()
    saved = [json.loads(line) for line in (tmp_path / "run" / "checkpoints.jsonl").read_text().splitlines()]
    assert [one["step"] for one in saved] == [4, 8, 12]
    for path in [*(one["path"] for one in saved), report.sampler_checkpoint]:
        assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4


def take(training: tinkex.TrainingClient, work: PreparedStep, adam: types.AdamParams) -> None:
    for data in work.passes:
        training.forward_backward(data, work.loss_fn)
    training.optim_step(adam).result()


class StopAfter(train.TrainingCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def stepped(self, step: int, metrics: Metrics) -> None:
        if step == self._step:
            raise KeyboardInterrupt


def test_an_interrupted_run_continues_as_if_it_had_never_stopped(
    service: tinkex.ServiceClient, chats: Path, tmp_path: Path
) -> None:
    whole = train.run(service, sft(chats, tmp_path / "whole", steps=6, eval_fraction=0))
    with pytest.raises(KeyboardInterrupt):
        train.run(service, sft(chats, tmp_path / "parts", steps=6, eval_fraction=0), StopAfter(2))
    resumed = train.resume(service, tmp_path / "parts")
    assert losses(resumed) == pytest.approx(losses(whole), abs=2e-4)
    assert [line["step"] for line in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    assert [one["before"] for one in resumed.samples] == [one["before"] for one in whole.samples]
    with pytest.raises(ConfigError, match="run of sft"):
        train.resume(service, tmp_path / "parts", recipe="dpo")
    chats.write_text(chats.read_text() + chats.read_text())
    with pytest.raises(ConfigError, match="has changed since this run started"):
        train.resume(service, tmp_path / "parts")
    advice = f"or resume it with: tinkex train sft --resume {tmp_path / 'parts'}$"
    with pytest.raises(SetupError, match=advice):
        train.run(service, sft(chats, tmp_path / "parts"))
    with pytest.raises(SetupError, match="contains no run"):
        train.resume(service, tmp_path / "nothing")


class Killed(BaseException):
    """Ends a run as a kill would: nothing is saved on the way out."""


class KillAfter(train.TrainingCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def stepped(self, step: int, metrics: Metrics) -> None:
        if step == self._step:
            raise Killed


def test_a_killed_run_continues_from_its_last_checkpoint_with_the_same_numbers(
    service: tinkex.ServiceClient, chats: Path, tmp_path: Path
) -> None:
    wanted = {"steps": 6, "eval_fraction": 0.34, "eval_every": 2}
    whole = train.run(service, sft(chats, tmp_path / "whole", **wanted))
    with pytest.raises(Killed):
        train.run(service, sft(chats, tmp_path / "parts", save_every=2, **wanted), KillAfter(5))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # it was writing
    resumed = train.resume(service, tmp_path / "parts")
    assert losses(resumed) == pytest.approx(losses(whole), abs=2e-4)
    assert [line["step"] for line in resumed.metrics] == [line["step"] for line in whole.metrics]
    assert resumed.evaluations[-1][1] == pytest.approx(whole.evaluations[-1][1], abs=2e-4)
    again = train.resume(service, tmp_path / "parts")
    assert (again.checkpoint, again.text) == (resumed.checkpoint, resumed.text)


def test_a_run_can_start_from_a_checkpoint(
    service: tinkex.ServiceClient, chats: Path, tmp_path: Path
) -> None:
    first = train.run(service, sft(chats, tmp_path / "a", steps=4, eval_fraction=0.2))
    settings = replace(sft(chats, tmp_path / "b", steps=1, eval_fraction=0.2), start_from=first.checkpoint)
    second = train.run(service, settings)
    assert second.evaluations[0][1] == pytest.approx(first.evaluations[-1][1], abs=1e-4)
    assert second.samples[0]["before"] == first.samples[0]["after"]


@pytest.fixture
def preferences(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"Q{n}", "chosen": "the sea.", "rejected": "a dog."} for n in range(5)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return file


def test_preferences_are_learned(service: tinkex.ServiceClient, preferences: Path, tmp_path: Path) -> None:
    settings = train.DpoSettings(
        data=preferences, output=tmp_path / "run", model=MODEL, rank=4, batch_size=2, learning_rate=0.01,
        epochs=3, eval_fraction=0.2, sample_tokens=4,
    )  # fmt: skip
    report = train.run(service, settings)
    assert report.curve[0] == pytest.approx(0.6931, abs=1e-3)  # the model is its own reference at first
    assert report.curve[-1] < 0.5
    assert report.metrics[-1]["eval_accuracy"] == 1.0


def preference_recipe(
    service: tinkex.ServiceClient, settings: train.DpoSettings, training: tinkex.TrainingClient
) -> tuple[Dpo, RunContext]:
    renderer = Renderer(training.get_tokenizer())
    initial = service.create_sampling_client(base_model=MODEL)
    return Dpo(settings, train.read_data(settings), renderer), RunContext(training, initial, renderer)


def answers(recipe: Dpo, context: RunContext, batch: list[int]) -> list[types.Datum]:
    """The chosen and rejected answers of pairs, in turn, each learned token with a weight of 1."""
    return [
        replace(
            datum,
            loss_fn_inputs={
                **datum.loss_fn_inputs,
                "weights": [float(weight != 0) for weight in datum.loss_fn_inputs["weights"].data],
            },
        )
        for data in recipe.prepare(context, [batch], 1).passes
        for datum in data
    ]


def test_the_gradient_of_preferences_is_that_of_the_loss_written_with_torch(
    service: tinkex.ServiceClient, preferences: Path, tmp_path: Path
) -> None:
    import torch

    beta, adam = 0.5, types.AdamParams(learning_rate=0.01)
    settings = train.DpoSettings(
        data=preferences, output=tmp_path / "x", beta=beta, sft_weight=0.0, eval_fraction=0.0
    )
    ours, other = (service.create_lora_training_client(MODEL, rank=4, seed=5) for _ in range(2))
    recipe, context = preference_recipe(service, settings, ours)
    data = answers(recipe, context, [0, 1])
    scored = (
        other.forward(data, "cross_entropy").result().loss_fn_outputs
    )  # before the first step: the reference
    sums = [
        float(
            (torch.tensor(each["logprobs"].data) * torch.tensor(datum.loss_fn_inputs["weights"].data)).sum()
        )
        for each, datum in zip(scored, data, strict=True)
    ]
    references = [(sums[0], sums[1]), (sums[2], sums[3])]

    def loss(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.zeros(())
        for place, (chosen, rejected) in enumerate(references):
            sums = [
                (
                    logprobs[2 * place + side]
                    * torch.tensor(data[2 * place + side].loss_fn_inputs["weights"].data)
                ).sum()
                for side in (0, 1)
            ]
            margin = (sums[0] - chosen) - (sums[1] - rejected)
            total = total - torch.nn.functional.logsigmoid(beta * margin)
        return total / len(references), {}

    for step in (1, 2, 3):
        take(ours, recipe.prepare(context, [[0, 1]], step), adam)
        other.forward_backward_custom(data, loss).result()
        other.optim_step(adam).result()
    found, wanted = (
        client.forward(data, "cross_entropy").result().metrics["loss:sum"] for client in (ours, other)
    )
    assert found == pytest.approx(wanted, rel=1e-4)


def test_the_weight_of_chosen_answers_makes_them_likelier(
    service: tinkex.ServiceClient, preferences: Path, tmp_path: Path
) -> None:
    losses = []
    for weight in (0.0, 5.0):
        settings = train.DpoSettings(
            data=preferences, output=tmp_path / f"{weight}", eval_fraction=0.0, sft_weight=weight
        )
        training = service.create_lora_training_client(MODEL, rank=4, seed=5)
        recipe, context = preference_recipe(service, settings, training)
        for step in (1, 2, 3):
            take(training, recipe.prepare(context, [[0, 1]], step), types.AdamParams(learning_rate=0.01))
        chosen = answers(recipe, context, [0, 1])[::2]
        losses.append(training.forward(chosen, "cross_entropy").result().metrics["loss:sum"])
    assert losses[1] < losses[0]


def test_rewards_are_learned(service: tinkex.ServiceClient, tmp_path: Path) -> None:
    data, rewards = tmp_path / "prompts.jsonl", tmp_path / "rewards.py"
    data.write_text("".join(json.dumps({"prompt": f"Say {word}", "letter": "e"}) + "\n" for word in ANSWERS))
    rewards.write_text(
        "def share(completion, example):\n"
        "    return completion.count(example['letter']) / max(len(completion), 1)\n"
    )
    settings = train.GrpoSettings(
        data=data, output=tmp_path / "run", model=MODEL, rank=4, learning_rate=0.02, batch_size=2, steps=12,
        reward=f"{rewards}:share", group_size=8, max_tokens=6, eval_fraction=0.2, eval_every=100, sample_tokens=4,
    )  # fmt: skip
    report = train.run(service, settings)
    assert report.headline == "reward"
    assert sum(report.curve[-3:]) > 1.5 * sum(report.curve[:3])
    assert [step for step, _ in report.evaluations] == [0, 12]


def test_groups_without_any_difference_change_nothing(service: tinkex.ServiceClient, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "Say it"}\n')
    settings = train.GrpoSettings(
        data=data, output=tmp_path / "run", model=MODEL, rank=2, steps=2, reward_regex="", group_size=2, max_tokens=3,
        sample_tokens=4,
    )  # fmt: skip
    report = train.run(service, settings)
    assert report.curve == [1.0, 1.0]
    assert report.samples[0]["before"] == report.samples[0]["after"]
    assert report.metrics[0]["used_answers"] == 0
