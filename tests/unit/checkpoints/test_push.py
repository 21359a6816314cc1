"""Pushing to a stand-in for the hub. The library reads HF_ENDPOINT when it is imported, so pushes are processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import Done, tinkex
from tests.servers import ServedEngine
from tests.unit.checkpoints.hub_standin import Hub, hub
from tinkex.checkpoints.push import repository_name

pytestmark = pytest.mark.slow


@pytest.fixture
def there() -> Iterator[Hub]:
    with hub() as standin:
        yield standin


@pytest.fixture(scope="module")
def saved(served_engine: ServedEngine) -> str:
    done = tinkex(
        "checkpoint", "save", "--base-model", "tiny/llama", "--name", "v1", "--kind", "training", "--json",
        server=served_engine,
    )  # fmt: skip
    path: str = done.json["path"]
    return path


def push(
    there: Hub, server: ServedEngine, home: Path, *arguments: str, token: str | None = "hf_right"
) -> Done:
    env = {
        "HF_ENDPOINT": there.url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    if token is not None:
        env["HF_TOKEN"] = token
    return tinkex(
        "checkpoint", "push-hf", *arguments, "--json", server=server, home=home, process=True, **env
    )


def test_a_checkpoint_becomes_a_private_repository_with_a_card(
    there: Hub, served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    pushed = push(there, served_engine, tmp_path, saved).json
    run_id = saved.removeprefix("tinker://").split("/")[0]
    assert pushed["repo_id"] == f"ada/{repository_name('tiny/llama', run_id)}"
    assert (pushed["revision"], pushed["public"]) == ("v1", False)
    assert there.private[pushed["repo_id"]]
    files = there.repos[pushed["repo_id"]]["v1"]
    assert sorted(files) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    card = files["README.md"].decode()
    assert f"tinker_path: {saved}" in card
    assert "base_model: tiny/llama" in card
    assert "library_name: peft" in card
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "tiny/llama"
    assert there.commits[-1]["summary"] == f"Upload adapter from {saved}"


def test_repository_branch_message_patterns_and_card_are_as_given(
    there: Hub, served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    pushed = push(
        there, served_engine, tmp_path, saved, "--repo", "mine", "--public", "--revision", "dev", "--commit-message",
        "hello", "--ignore-pattern", "*.json", "--no-model-card",
    ).json  # fmt: skip
    assert (pushed["repo_id"], pushed["revision"]) == ("ada/mine", "dev")
    assert not there.private["ada/mine"]
    assert sorted(there.repos["ada/mine"]["dev"]) == ["adapter_model.safetensors"]
    assert there.commits[-1]["summary"] == "hello"
    push(there, served_engine, tmp_path, saved, "-r", "ada/mine", "--allow-pattern", "manifest.json")
    assert sorted(there.repos["ada/mine"]["main"]) == ["manifest.json"]
    pull = push(there, served_engine, tmp_path, saved, "-r", "ada/mine", "--create-pr").json
    assert pull["url"].endswith("/discussions/1")
    assert "README.md" in there.repos["ada/mine"]["refs/pr/1"]


def test_another_checkpoints_repository_is_not_written_over(
    there: Hub, served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    card = b"---\ntinker_path: tinker://other:train:0/weights/x\n---\n"
    there.repos["ada/taken"] = {"main": {"README.md": card}}
    done = push(there, served_engine, tmp_path, saved, "--repo", "ada/taken")
    assert (done.code, done.out) == (1, "")
    assert "tinker://other:train:0/weights/x" in done.err
    assert there.repos["ada/taken"]["main"] == {"README.md": card}
    pushed = push(there, served_engine, tmp_path, saved, "--repo", "ada/taken", "--revision", "mine").json
    assert pushed["revision"] == "mine"
    mine = there.repos["ada/taken"]["mine"]
    assert sorted(mine) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert saved in mine["README.md"].decode()
    assert there.repos["ada/taken"]["main"] == {"README.md": card}


def test_a_new_branch_has_nothing_of_the_checkpoint_on_main(
    there: Hub, served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    there.repos["ada/old"] = {"main": {"README.md": b"old", "old.bin": b"old"}}
    done = push(
        there, served_engine, tmp_path, saved, "-r", "ada/old", "--revision", "new", "--no-model-card"
    )
    assert done.code == 0, done.err
    assert sorted(there.repos["ada/old"]["new"]) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_without_a_login_the_error_says_how_to_get_one(
    token: str | None, there: Hub, served_engine: ServedEngine, saved: str, tmp_path: Path
) -> None:
    done = push(there, served_engine, tmp_path, saved, token=token)
    assert (done.code, done.out) == (1, "")
    assert "hf auth login" in done.err
    assert "hf_wrong" not in done.err
