"""Parquet files and Hugging Face datasets, with the real packages in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tests.cli.commands import tinkex as command
from tests.programs import own_environment
from tests.servers import ServedEngine
from tests.unit.train.dataset_hub import dataset_hub

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("dataset_program.py")
COMMON = ("--rank", "2", "--steps", "2", "--sample-tokens", "2")


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python with ``datasets``, made once and reused."""
    return own_environment("datasets", "datasets>=3", "pyarrow>=15")


def run(python: Path, *arguments: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with ``datasets`` and this package."""
    paths = [str(Path(tinkex.__file__).parents[1]), sysconfig.get_path("purelib")]
    hidden = [name for name in os.environ if name.startswith(("TINKER_", "HF_"))]
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    own = {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(cwd / "hf"), "TINKER_TELEMETRY": "0", **env}
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, env={**kept, **own}, cwd=cwd, check=False
    )


def test_parquet_files_and_dataset_directories_are_read(python: Path, tmp_path: Path) -> None:
    done = run(python, PROGRAM, tmp_path, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    expected = ["messages", "Q0", "Q1", "Q2"]
    assert json.loads(done.stdout) == dict.fromkeys(("a.parquet", "saved", "splits", "shards"), expected)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A hub with a dataset of two splits, and one whose splits have other names."""
    folder = tmp_path_factory.mktemp("hub")
    row = {"question": "Where?", "answer": "The sea."}
    for name, splits in {"sea": {"train": 12, "test": 3}, "odd": {"easy": 2, "hard": 4}}.items():
        (folder / name).mkdir()
        configs = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
        card = json.dumps({"configs": [{"config_name": "default", "data_files": configs}]})
        (folder / name / "README.md").write_text(f"---\n{card}\n---\n")
        for split, size in splits.items():
            (folder / name / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * size)
    with dataset_hub({"ada/sea": folder / "sea", "ada/odd": folder / "odd"}) as url:
        yield url


def test_datasets_of_the_hub_are_read_by_their_names(python: Path, hub: str, tmp_path: Path) -> None:
    names = ("ada/sea", "ada/sea:test", "ada/odd:hard", "ada/odd", "ada/sea:dev", "ada/none")
    done = run(python, PROGRAM, tmp_path, *names, cwd=tmp_path, HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, count in (("ada/sea", 12), ("ada/sea:test", 3), ("ada/odd:hard", 4)):
        assert found[name] == ["question/answer", *["Where?"] * count]
    assert found["ada/odd"] == "ada/odd has the splits easy, hard; choose one as ada/odd:easy"
    for name in ("ada/sea:dev", "ada/none"):
        reason = f"there is no file {name}, and no dataset of that name could be loaded from the Hub: "
        assert found[name].startswith(reason)
        assert found[name].endswith(". A private one needs HF_TOKEN")
    assert done.stderr == "", "no progress bars, because stderr is not a terminal"


def test_a_dataset_of_the_hub_is_trained_on_by_its_name(
    python: Path, hub: str, served_engine: ServedEngine, tmp_path: Path
) -> None:
    env = {"HF_ENDPOINT": hub, "TINKER_BASE_URL": served_engine.url, "TINKER_API_KEY": served_engine.key}
    train = ("-m", "tinkex", "train", "sft", "ada/sea", *COMMON)
    done = run(python, *train, "-o", "run", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert "11 examples from ada/sea (question/answer), 1 held out for evaluation" in done.stderr
    assert "(SFT): 2 steps on 11 examples" in done.stdout
    quiet = run(python, *train, "--check", "--json", cwd=tmp_path, **env)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert json.loads(quiet.stdout)["num_examples"] == 11


def test_a_dataset_that_cannot_be_loaded_is_explained_before_anything_starts(
    python: Path, tmp_path: Path
) -> None:
    unreachable = ("--base-url", "http://127.0.0.1:9", "--api-key", "tml-x")
    command = ("-m", "tinkex", "train", "sft", "ada/sea", *unreachable)
    done = run(python, *command, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "Error: there is no file ada/sea, and no dataset of that name could be loaded from the Hub: "
        in done.stderr
    )
    assert "127.0.0.1:9" not in done.stderr


def test_a_missing_package_is_named_with_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for data in ("a.parquet", "owner/name"):
        done = command("train", "sft", data, "--local", cwd=tmp_path, home=tmp_path)
        assert done.code == 1
        assert "pip install 'tinkex[data]'" in done.err
