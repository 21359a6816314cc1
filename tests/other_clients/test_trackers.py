"""Experiment trackers: each real package gets the metrics of a run, offline, and reads them back."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.other_clients.environments import run_python
from tests.servers import ServedEngine

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_tracker_has_the_metrics_of_every_step_and_evaluation(
    name: str, served_engine: ServedEngine, tmp_path: Path
) -> None:
    data = tmp_path / "chats.jsonl"
    lines = [{"prompt": f"Question {n}?", "completion": f"answer {n}."} for n in range(6)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [str(SOURCE), sysconfig.get_path("purelib")]
    arguments = [name, str(data), str(tmp_path / "run"), *paths]
    found = run_python(name, served_engine, *arguments, program="tracker")
    wanted: dict[str, dict[int, float]] = {}
    for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        line: dict[str, Any] = json.loads(text)
        for tag, value in line.items():
            if tag not in {"step", "packing"}:
                wanted.setdefault(tag, {})[line["step"]] = value
    assert {"loss", "eval_loss"} <= wanted.keys()
    assert found.keys() == wanted.keys()
    for tag, values in wanted.items():
        assert dict(map(tuple, found[tag])) == pytest.approx(values, rel=1e-6)
