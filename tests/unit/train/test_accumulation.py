"""Gradient accumulation: several batches and one optimizer step equal one large batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.unit.train.test_runs import MODEL, chats, preferences, service, sft
from tinkex import train

__all__ = ["chats", "preferences", "service"]

pytestmark = pytest.mark.slow


def curves(report: train.TrainingReport) -> list[tuple[int, float]]:
    """The loss of every step and evaluation."""
    return [(line["step"], line.get("loss", line.get("eval_loss"))) for line in report.metrics]


def assert_alike(parts: train.TrainingReport, whole: train.TrainingReport) -> None:
    """Fails unless both runs took the same steps, up to rounding."""
    assert [step for step, _ in curves(parts)] == [step for step, _ in curves(whole)]
    assert [loss for _, loss in curves(parts)] == pytest.approx([loss for _, loss in curves(whole)], abs=2e-4)
    assert sum(line.get("num_tokens", 0) for line in parts.metrics) == sum(
        line.get("num_tokens", 0) for line in whole.metrics
    )


def test_answers_are_learned_as_with_one_large_batch(
    service: tinkex.ServiceClient, chats: Path, tmp_path: Path
) -> None:
    common = {"eval_fraction": 0.2, "epochs": 3, "schedule": "cosine", "warmup_steps": 2}
    whole = train.run(service, sft(chats, tmp_path / "whole", **common, batch_size=4))
    parts = train.run(service, sft(chats, tmp_path / "parts", **common, batch_size=2, accumulate=2))
    assert_alike(parts, whole)
    assert len(whole.curve) == 6
    packed = [
        [one["num_sequences"] for one in line["packing"]] for line in parts.metrics if "packing" in line
    ]
    assert packed == [[2, 2], [1]] * 3, "five examples: the last step of an epoch has fewer batches"
    assert len(whole.packing) == 6


def test_preferences_are_learned_as_with_one_large_batch(
    service: tinkex.ServiceClient, preferences: Path, tmp_path: Path
) -> None:
    def run(**batches: int) -> train.TrainingReport:
        name = "-".join(map(str, batches.values()))
        settings = train.DpoSettings(
            data=preferences, output=tmp_path / name, model=MODEL, rank=4, learning_rate=0.01, steps=4,
            eval_fraction=0.0, sample_tokens=2, **batches,
        )  # fmt: skip
        return train.run(service, settings)

    assert_alike(run(batch_size=1, accumulate=3), run(batch_size=3))


def test_answers_are_drawn_and_learned_as_with_one_large_batch(
    service: tinkex.ServiceClient, tmp_path: Path
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(4)))

    def run(**batches: Any) -> train.TrainingReport:
        settings = train.GrpoSettings(
            data=data, output=tmp_path / "-".join(map(str, batches.values())), model=MODEL, rank=4, learning_rate=0.001,
            steps=2, reward_regex="[a-m]", group_size=4, max_tokens=4, sample_tokens=2, **batches,
        )  # fmt: skip
        return train.run(service, settings)

    parts, whole = run(batch_size=2, accumulate=2), run(batch_size=4)
    assert parts.curve[0] == whole.curve[0], "the same answers"
    assert parts.metrics[0]["loss"] == pytest.approx(whole.metrics[0]["loss"], abs=1e-4)
    assert sum(one.num_sequences for one in parts.packing) == sum(one.num_sequences for one in whole.packing)
