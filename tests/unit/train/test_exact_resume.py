"""Interrupted and resumed, a run has the numbers of one that was not, bit for bit, with every option that changes them."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.servers import ServedEngine, serve
from tests.unit.train.test_runs import KillAfter, Killed, StopAfter
from tinkex import train
from tinkex.checkpoints import download_checkpoint
from tinkex.config import Config
from tinkex.errors import ConfigError

pytestmark = pytest.mark.slow

REWARDS = "def vowels(completion): return sum(completion.count(c) for c in 'aeiou')\ndef size(completion): return len(completion)\n"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """A server whose results do not depend on what else runs, or in which order requests arrive."""
    home = tmp_path_factory.mktemp("deterministic")
    with serve(home, "--model", f"tiny/llama={tiny_model}", "--deterministic") as running:
        yield running


@pytest.fixture
def service(server: ServedEngine) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(config=Config(base_url=server.url, api_key=server.key)) as client:
        yield client


def grpo(folder: Path, name: str, **more: Any) -> train.GrpoSettings:
    data, rewards = folder / "prompts.jsonl", folder / "rewards.py"
    data.write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(12)))
    rewards.write_text(REWARDS)
    return train.GrpoSettings(
        data=data, output=folder / name, model="tiny/llama", rank=4, learning_rate=0.01, schedule="linear", batch_size=2,
        accumulate=2, steps=5, reward=(f"{rewards}:vowels", f"{rewards}:size=-0.1"), reward_regex=("e",), kl_coef=0.2,
        group_size=3, max_tokens=5, eval_fraction=0.1, eval_every=2, sample_tokens=3, **more,
    )  # fmt: skip


def sft(folder: Path, name: str, **more: Any) -> train.SftSettings:
    data = folder / "chats.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"Q{n}?", "completion": f"A{n}."}) + "\n" for n in range(12))
    )
    return train.SftSettings(
        data=data, output=folder / name, model="tiny/llama", rank=4, batch_size=2, accumulate=3, epochs=3,
        warmup_steps=1, schedule="cosine", eval_fraction=0.1, eval_every=2, sample_tokens=3, **more,
    )  # fmt: skip


@pytest.mark.parametrize("make", [sft, grpo])
def test_a_resumed_run_repeats_every_number(
    server: ServedEngine, service: tinkex.ServiceClient, tmp_path: Path, make: Any
) -> None:
    whole = train.run(service, make(tmp_path, "whole", save_every=2))
    trained = weights(server, whole.checkpoint, tmp_path)
    for name, stop in (("stopped", StopAfter(3)), ("killed", KillAfter(3))):
        with pytest.raises((KeyboardInterrupt, Killed)):
            train.run(service, make(tmp_path, name, save_every=2), stop)
        assert not (tmp_path / name / "report.json").exists()
        resumed = train.resume(service, tmp_path / name)
        assert resumed.metrics == whole.metrics, name
        assert resumed.samples == whole.samples
        assert weights(server, resumed.checkpoint, tmp_path) == trained


def test_a_run_whose_rewards_have_changed_is_not_resumed(
    service: tinkex.ServiceClient, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train.run(service, grpo(tmp_path, "run"), StopAfter(1))
    (tmp_path / "rewards.py").write_text(REWARDS + "# other\n")
    with pytest.raises(ConfigError, match=r"rewards\.py has changed since this run started"):
        train.resume(service, tmp_path / "run")


def weights(server: ServedEngine, checkpoint: str, folder: Path) -> bytes:
    """The adapter of a checkpoint, as a file."""
    config = Config(base_url=server.url, api_key=server.key)
    found = download_checkpoint(checkpoint, folder / "adapters", config=config)
    return (found.directory / "adapter_model.safetensors").read_bytes()


def computed(server: ServedEngine) -> int:
    """The tokens that the server has computed for passes so far."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"X-API-Key": server.key})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = re.search(r'tinkex_tokens_total\{what="trained_computed"\} (\d+)', answer.read().decode())
    assert found is not None
    return int(found[1])


def test_the_packing_report_is_what_the_server_has_computed(
    server: ServedEngine, service: tinkex.ServiceClient, tmp_path: Path
) -> None:
    before = computed(server)
    report = train.run(service, grpo(tmp_path, "run"))
    assert sum(one.computed_tokens for one in report.packing) == computed(server) - before
    assert sum(one.computed_tokens for one in report.packing) < sum(one.num_tokens for one in report.packing)
    assert len(report.packing) == 10, "two passes for each of five steps"
    assert f"Packing             {len(report.packing)} passes of " in report.text
