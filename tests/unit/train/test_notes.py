"""What the report of a run warns of."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.train.notes import notes

FINE = {"before": "It is a long story, and it begins with the sea and the wind.", "after": "Paris."}
LOOP = {**FINE, "after": "the sea and the sea and the sea and the sea and the sea and the sea"}


def evaluated(headline: str, *values: float) -> list[dict[str, Any]]:
    return [{"step": 10 * place, f"eval_{headline}": value} for place, value in enumerate(values)]


@pytest.mark.parametrize(
    ("headline", "metrics", "sample", "said"),
    [
        ("loss", evaluated("loss", 2.0, 1.0, 1.5), FINE, "--steps 10"),
        ("reward", evaluated("reward", 0.1, 0.9, 0.5), FINE, "--steps 10"),
        ("loss", [{"step": 1, "loss": 0.1, "chosen_shift": -4.0}], FINE, "--sft-weight"),
        ("reward", [{"step": 1, "reward": 0.0, "used_answers": 0.0}], FINE, "--group-size"),
        ("loss", [], LOOP, "repeats itself"),
    ],
)
def test_signs_of_a_run_gone_wrong_are_named_with_what_to_do(
    headline: str, metrics: list[dict[str, Any]], sample: dict[str, str], said: str
) -> None:
    (note,) = notes(headline, metrics, [sample], num_held_out=10)
    assert said in note


@pytest.mark.parametrize(
    ("headline", "metrics"),
    [
        ("loss", evaluated("loss", 2.0, 1.0, 1.04)),
        ("reward", evaluated("reward", 0.2, 0.8)),
        ("loss", [{"step": 1, "loss": 0.1, "chosen_shift": 3.0}]),
        (
            "reward",
            [
                {"step": 1, "reward": 0.5, "used_answers": 0.0},
                {"step": 2, "reward": 0.5, "used_answers": 0.5},
            ],
        ),
    ],
)
def test_a_run_that_went_well_has_no_notes(headline: str, metrics: list[dict[str, Any]]) -> None:
    assert notes(headline, metrics, [FINE, {**LOOP, "before": LOOP["after"]}], num_held_out=10) == []


def test_advice_can_be_followed_and_needs_enough_held_out_examples() -> None:
    worse = evaluated("reward", 0.9, 0.2)
    (note,) = notes("reward", worse, [FINE], num_held_out=20)
    assert "better before training" in note
    assert "--steps" not in note
    assert notes("reward", worse, [FINE], num_held_out=2) == []
