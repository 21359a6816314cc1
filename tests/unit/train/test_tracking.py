"""Where the metrics of a run also go: experiment trackers, and the records of the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tinkex
from tests.servers import ServedEngine
from tinkex import train
from tinkex.config import Config
from tinkex.errors import ConfigError, SetupError

MODEL = "tiny/llama"


def write_lines(file: Path, lines: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_tracker_that_is_not_installed_is_named_with_its_command_before_any_request(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "chats.jsonl", [{"prompt": "a", "completion": "b"}])
    settings = train.SftSettings(data=data, output=tmp_path / "run", eval_fraction=0, track=("wandb",))
    service = tinkex.ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-x")
    with pytest.raises(SetupError, match="pip install wandb"):
        train.run(service, settings)
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="track has 'aim'; the trackers are tensorboard, wandb, trackio, mlflow"
    ):
        train.SftSettings(data=tmp_path / "x", output=tmp_path / "run", track=("aim",))


@pytest.mark.slow
def test_the_server_has_the_metrics_and_rollouts_of_a_grpo_run(
    served_engine: ServedEngine, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"Question {n}?"} for n in range(6)])
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def length(prompt, completion, **fields):\n    return len(completion) / 10\n")
    settings = train.GrpoSettings(
        data=data, output=tmp_path / "run", model=MODEL, rank=4, steps=2, batch_size=2, group_size=3,
        max_tokens=6, sample_tokens=4, eval_fraction=0.3, reward=(f"{rewards}:length",),
    )  # fmt: skip
    config = Config(base_url=served_engine.url, api_key=served_engine.key)
    with tinkex.ServiceClient(config=config) as service:
        report = train.run(service, settings)
        run_id = report.checkpoint.split("/")[2]
        rest = service.create_rest_client()
        metrics = rest.get_training_run_metrics(run_id).result(60)
        rollouts = rest.list_rollouts(run_id, 1).result(60)
    steps = {line["step"]: line for line in report.metrics if "reward" in line}
    assert metrics["reward"].steps == [*steps]
    assert metrics["reward"].values == [line["reward"] for line in steps.values()]
    assert metrics["eval_reward"].values[0] is not None
    assert rollouts.steps == [1, 2]
    found = [logged.rollout for logged in rollouts.rollouts]
    assert [one.group for one in found] == ["0"] * 3 + ["1"] * 3
    scores = [one.reward for one in found if one.reward is not None]
    assert sum(scores) / 6 == pytest.approx(steps[1]["reward"])
    assert all(one.text is not None and one.reward == len(one.text) / 10 for one in found)
    assert all(one.logprobs is not None and len(one.logprobs) == len(one.tokens) for one in found)
    assert all(one.prompt is not None and one.prompt.startswith("Question") for one in found)
