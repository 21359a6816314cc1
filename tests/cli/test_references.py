"""Short names of checkpoints and runs at the prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import tinkex
from tests.cli.relay import relay
from tests.servers import ServedEngine
from tinkex.checkpoints import resolve_checkpoint
from tinkex.clients.rest import RestClient
from tinkex.config import Config
from tinkex.errors import SetupError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(served_engine: ServedEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a complete run, with a checkpoint and an evaluation at every step."""
    folder = tmp_path_factory.mktemp("named")
    data = folder / "data.jsonl"
    data.write_text('{"prompt": "Where?", "completion": "The sea."}\n' * 12)
    options = (
        "--rank",
        "2",
        "--steps",
        "3",
        "--sample-tokens",
        "2",
        "--save-every",
        "1",
        "--eval-every",
        "1",
    )
    done = tinkex("train", "sft", str(data), *options, server=served_engine, cwd=folder)
    assert done.code == 0, done.err
    (directory,) = (folder / "tinkex-runs").iterdir()
    return directory


@pytest.fixture(scope="module")
def report(run: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((run / "report.json").read_text())
    return found


def info(server: ServedEngine, name: str, cwd: Path | None = None) -> str:
    path: str = tinkex("checkpoint", "info", name, "--json", server=server, cwd=cwd).json["tinker_path"]
    return path


def test_a_checkpoint_is_named_by_its_run_its_rank_or_the_beginning_of_its_path(
    served_engine: ServedEngine, run: Path, report: dict[str, str]
) -> None:
    checkpoint, run_id = report["checkpoint"], report["checkpoint"].removeprefix("tinker://").split("/")[0]
    assert info(served_engine, str(run)) == checkpoint
    assert info(served_engine, f"{run}@last") == checkpoint
    assert info(served_engine, f"{run_id}/weights/fin") == checkpoint
    assert info(served_engine, run_id[:20]).startswith(f"tinker://{run_id}/")
    scores = {
        line["step"]: line["eval_loss"] for line in report["metrics"] if "eval_loss" in line and line["step"]
    }  # type: ignore[index]
    best = min(scores, key=lambda step: scores[step])
    name = "final" if best == 3 else f"step-{best:06d}"
    assert info(served_engine, "@best", run.parent.parent) == f"tinker://{run_id}/weights/{name}"


def test_the_newest_checkpoint_and_run_are_last(served_engine: ServedEngine, run: Path) -> None:
    new = ("--base-model", "tiny/llama", "--rank", "2", "--name", "newest", "--kind", "training", "--json")
    path = tinkex("checkpoint", "save", *new, server=served_engine).json["path"]
    assert info(served_engine, "@last") == path
    assert tinkex("sample", "x", "--max-tokens", "1", "--model-path", "@last", server=served_engine).code == 0
    newest = tinkex("run", "info", "@last", "--json", server=served_engine).json["training_run_id"]
    assert newest == path.removeprefix("tinker://").split("/")[0]
    assert (
        tinkex("run", "info", newest[:20], "--json", server=served_engine).json["training_run_id"] == newest
    )
    named = tinkex("run", "info", str(run), "--json", server=served_engine).json["training_run_id"]
    listed = tinkex("checkpoint", "list", "--run-id", str(run), "--json", server=served_engine).json[
        "checkpoints"
    ]
    assert all(one["tinker_path"].startswith(f"tinker://{named}/") for one in listed)
    assert len(listed) >= 4


def test_a_name_of_nothing_or_of_several_says_so(served_engine: ServedEngine, run: Path) -> None:
    nothing = tinkex("checkpoint", "info", "nosuch", server=served_engine)
    assert nothing.code == 1
    assert "no checkpoint whose path starts with 'nosuch'" in nothing.err
    unknown = tinkex("checkpoint", "info", "@lst", server=served_engine)
    assert "'@lst' is not a short name; there are @last and @best" in unknown.err
    for name in ("one", "other"):
        new = ("--base-model", "tiny/llama", "--rank", "2", "--name", name, "--kind", "training", "--json")
        assert tinkex("checkpoint", "save", *new, server=served_engine).code == 0
    rest = RestClient(config=Config(base_url=served_engine.url, api_key=served_engine.key))
    with pytest.raises(SetupError, match="beginning of several runs"):
        resolve_checkpoint("tinker://", rest)
    elsewhere = tinkex("checkpoint", "info", "@best", server=served_engine, cwd=run)
    assert "write DIRECTORY@best" in elsewhere.err


def test_a_download_has_no_colons_and_resumes_one_of_an_earlier_release(
    served_engine: ServedEngine, report: dict[str, str], tmp_path: Path
) -> None:
    path = report["checkpoint"]
    older = tmp_path / ("." + path.removeprefix("tinker://").replace("/", "_") + ".partial")
    with relay(served_engine.url, "/downloads/", limit=4_000) as proxy:
        env = {"TINKER_BASE_URL": proxy.url, "TINKER_API_KEY": served_engine.key}
        older.mkdir()
        (older / "state.json").write_text(json.dumps({"checkpoint": path}))
        proxy.released.set()
        done = tinkex("checkpoint", "download", path, "--json", cwd=tmp_path, **env).json
    assert ":" not in Path(done["destination"]).name
    assert (Path(done["destination"]) / "adapter_config.json").is_file()
    assert not older.exists()
