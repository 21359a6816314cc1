"""The parts of the recipes that can be checked by themselves: settings, rates, batches, rewards, preferences."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.train.dpo import preference
from tinkex.train.grpo import advantages
from tinkex.train.loop import learning_rate, num_steps, step_batches
from tinkex.train.rewards import RewardSum, load_reward, pattern_reward, split_weight
from tinkex.train.settings import DpoSettings, GrpoSettings, SftSettings, settings_from

PLACES = {"data": Path("a.jsonl"), "output": Path("run")}


def test_settings_survive_being_kept_in_a_file() -> None:
    for made in (
        SftSettings(**PLACES, train_on="all", sample_prompts=("a", "b"), eval_data=Path("e.jsonl")),
        DpoSettings(**PLACES, beta=0.3),
        GrpoSettings(**PLACES, reward_regex="x", group_size=4),
        GrpoSettings(**PLACES, reward=("a.py:f", "a.py:g=0.5"), kl_coef=0.1, accumulate=3, report=True),
    ):
        assert settings_from(made.as_json()) == made


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"steps": 0}, "steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
    ],
)
def test_settings_that_make_no_sense_are_rejected(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SftSettings(**PLACES, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rank": 1.5}, "rank must be a whole number, got 1.5"),
        ({"accumulate": True}, "accumulate must be a whole number"),
        ({"schedule": "sine"}, "schedule must be 'constant' or 'linear' or 'cosine', got 'sine'"),
        ({"too_long": "drop"}, "too_long must be 'error' or 'skip' or 'cut'"),
        ({"report": "yes"}, "report must be true or false"),
        ({"learning_rate": "0.1"}, "learning_rate must be a number"),
        ({"sample_prompts": "Hi"}, "sample_prompts must be a list of texts"),
        ({"columns": {"prompt": 3}}, "columns must be a table of texts"),
        ({"steps": "3"}, "steps must be a whole number"),
        ({"reward": [3]}, "reward must be a text or a list of texts"),
        ({"kl_coef": -0.1}, "kl_coef must be at least 0"),
        ({"kl_coef": math.nan}, "kl_coef must be at least 0"),
        ({"max_tokens": 9, "max_length": 9}, "leaves no room for a prompt"),
        ({"ttl_seconds": 60}, "--save-every"),
    ],
)
def test_a_file_with_a_value_of_another_type_is_rejected(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        settings_from({"recipe": "grpo", "data": "a.jsonl", "output": "run", "reward_regex": "x", **wrong})


def test_a_reward_is_required() -> None:
    with pytest.raises(ConfigError, match="a reward is missing"):
        GrpoSettings(**PLACES)
    both = GrpoSettings(**PLACES, reward="a.py:f", reward_regex="x")
    assert (both.reward, both.reward_regex) == (("a.py:f",), ("x",))
    with pytest.raises(ConfigError, match="group_size must be at least 2"):
        GrpoSettings(**PLACES, reward_regex="x", group_size=1)
    with pytest.raises(ConfigError, match="beta"):
        DpoSettings(**PLACES, beta=0)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_every_epoch_sees_every_example_once_however_it_is_divided_into_batches(
    num_examples: int, batch_size: int, accumulate: int, seed: int
) -> None:
    settings = SftSettings(**PLACES, batch_size=batch_size, accumulate=accumulate, seed=seed, epochs=2)
    large = replace(settings, batch_size=batch_size * accumulate, accumulate=1)
    per_epoch = math.ceil(num_examples / (batch_size * accumulate))
    assert num_steps(settings, num_examples) == num_steps(large, num_examples) == 2 * per_epoch
    for epoch in range(2):
        seen = []
        for step in range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1):
            batches = step_batches(settings, num_examples, step)
            assert [[place for batch in batches for place in batch]] == step_batches(
                large, num_examples, step
            )
            assert all(len(batch) == batch_size for batch in batches[:-1])
            assert 1 <= len(batches[-1]) <= batch_size
            seen += [place for batch in batches for place in batch]
        assert sorted(seen) == list(range(num_examples))


def test_learning_rates_rise_and_fall_as_set() -> None:
    assert [learning_rate(1.0, step, 6, "constant", 2) for step in range(1, 7)] == [0.5, 1, 1, 1, 1, 1]
    linear = [learning_rate(1.0, step, 6, "linear", 2) for step in range(1, 7)]
    assert linear == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = [learning_rate(1.0, step, 4, "cosine", 0) for step in range(1, 5)]
    assert cosine == pytest.approx([1.0, 0.8536, 0.5, 0.1464], abs=1e-4)


@given(st.floats(-2000, 2000), st.floats(0.01, 2))
def test_the_pull_of_a_pair_is_the_slope_of_its_loss(margin: float, beta: float) -> None:
    loss, pull = preference(margin, beta)
    step = 1e-4
    slope = (preference(margin + step, beta)[0] - preference(margin - step, beta)[0]) / (2 * step)
    assert math.isfinite(loss)
    assert pull == pytest.approx(-slope, abs=1e-5, rel=1e-3)


def test_advantages_are_relative_to_the_group() -> None:
    assert advantages([1.0, 1.0, 1.0], normalize=True) == [0.0, 0.0, 0.0]
    mixed = advantages([0.0, 3.0], normalize=True)
    assert mixed == [-1.0, 1.0]
    assert sum(advantages([0.2, 0.9, 0.4], normalize=True)) == pytest.approx(0)


def test_a_reward_is_a_function_in_a_file_called_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def right(completion, example):\n    return example['answer'] in completion\n"
        "def wants(prompt, completion, model): return 0\n"
        "def blind(prompt): return 0\n"
        "def every(**given): return len(given)\n"
        "def broken(completion): raise RuntimeError('oops')\n"
        "def endless(completion): return float('inf')\n"
        "def word(completion): return 'much'\n"
    )
    reward = load_reward(f"{file}:right")
    assert (reward("2+2?", "It is 4", {"answer": "4"}), reward("", "5", {"answer": "4"})) == (1.0, 0.0)
    assert load_reward(f"{file}:every")("a", "b", {}) == 3.0
    for name, said in (("wants", "'model'"), ("blind", "does not use"), ("none", "has right, wants")):
        with pytest.raises(ConfigError, match=said):
            load_reward(f"{file}:{name}")
    for name, said in (("broken", "RuntimeError: oops"), ("endless", "finite"), ("word", "ValueError")):
        with pytest.raises(ConfigError, match=said):
            load_reward(f"{file}:{name}")("a", "b", {})
    with pytest.raises(ConfigError, match=r"file\.py:function"):
        load_reward("right")
    with pytest.raises(ConfigError, match="no file"):
        load_reward(f"{tmp_path}/none.py:right")
    file.write_text("1/0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_reward(f"{file}:right")
    with pytest.raises(ConfigError, match="regular expression"):
        pattern_reward("(")


def test_several_rewards_are_added_with_their_weights_and_kept_apart(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def long(completion): return len(completion)\ndef sea(completion): return 'sea' in completion\n"
    )
    rewards = RewardSum.load([f"{file}:long=-0.25", f"{file}:sea", f"{file}:sea=0"], ["^The", "z"])
    assert rewards.score("Where?", "The sea", {}) == {
        "reward": -0.25 * 7 + 1 + 0 + 1,
        "reward_long": 7.0,
        "reward_sea": 1.0,
        "reward_sea_3": 1.0,
        "reward_regex": 1.0,
        "reward_regex_5": 0.0,
    }
    assert RewardSum.load([f"{file}:long=2"], []).score("", "sea", {}) == {"reward": 6.0}


@pytest.mark.parametrize("weight", ["", "much", "nan", "inf"])
def test_a_weight_that_is_not_a_number_is_rejected(weight: str) -> None:
    with pytest.raises(ConfigError, match="is not a number"):
        split_weight(f"mine.py:f={weight}")


def test_rewards_that_all_weigh_nothing_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def sea(completion): return 0\n")
    with pytest.raises(ConfigError, match="every reward has the weight 0"):
        RewardSum.load([f"{file}:sea=0"], [])
