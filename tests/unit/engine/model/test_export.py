from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny_llama
from tinkex.engine.model.export import export_model
from tinkex.engine.model.lora import Adapter, LoraSpec
from tinkex.engine.model.stored_tensors import read_architecture
from tinkex.errors import InvalidInput, SetupError


@pytest.fixture
def adapter(tiny_model: Path) -> Adapter:
    return Adapter.create(read_architecture(tiny_model), LoraSpec(rank=2, seed=0))


def test_an_existing_target_is_rejected_and_left_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("keep")
    with pytest.raises(InvalidInput, match="exists already"):
        export_model(tiny_model, target)
    assert [entry.name for entry in target.iterdir()] == ["notes.txt"]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="exists already"):
        export_model(tiny_model, tmp_path / "link")


def test_progress_counts_up_to_all_weights(tiny_model: Path, tmp_path: Path, adapter: Adapter) -> None:
    seen: list[tuple[str, int, int | None]] = []
    export_model(tiny_model, tmp_path / "out", adapter, progress=lambda *step: seen.append(step))
    weights = [(done, total) for phase, done, total in seen if phase == "merging weights"]
    assert [done for done, _ in weights] == sorted(done for done, _ in weights)
    assert weights[-1][0] == weights[-1][1]


def test_an_export_that_is_broken_off_leaves_nothing(
    tiny_model: Path, tmp_path: Path, adapter: Adapter
) -> None:
    class Stop(Exception):
        pass

    def stop(phase: str, done: int, total: int | None) -> None:
        if done > 100_000:
            raise Stop

    with pytest.raises(Stop):
        export_model(tiny_model, tmp_path / "out", adapter, progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"), [({"dtype": "int8"}, "int8"), ({"max_shard_bytes": 0}, "max_shard_bytes")]
)
def test_options_that_make_no_sense_are_rejected_and_named(
    tiny_model: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        export_model(tiny_model, tmp_path / "out", **options)


def test_an_adapter_of_another_model_is_rejected(tmp_path: Path, adapter: Adapter) -> None:
    other = tiny_llama(tmp_path / "other", layers=1)
    with pytest.raises(InvalidInput, match="another model"):
        export_model(other, tmp_path / "out", adapter)


def test_weights_that_are_not_finite_or_too_large_for_float16_are_rejected(
    tiny_model: Path, tmp_path: Path, adapter: Adapter
) -> None:
    for params, dtype, words in (
        (torch.full_like(adapter.params, float("nan")), "float32", "not finite"),
        (torch.full_like(adapter.params, 1e3), "float16", "range of float16"),
    ):
        with pytest.raises(InvalidInput, match=words):
            export_model(tiny_model, tmp_path / "out", adapter.with_params(params), dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written_is_named(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        export_model(tiny_model, tmp_path / "file" / "out")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_memory_holds_a_few_tensors_not_the_model(tmp_path: Path) -> None:
    """Twenty layers of 3 MB, written one tensor at a time."""
    base = tiny_llama(tmp_path / "base", layers=20, hidden=256, intermediate=1024)
    size = (base / "model.safetensors").stat().st_size
    adapter = Adapter.create(read_architecture(base), LoraSpec(rank=2, seed=0))
    held = [private_memory()]
    export_model(base, tmp_path / "out", adapter, progress=lambda *_: held.append(private_memory()))
    assert len(held) > 100
    assert max(held) - held[0] < size / 4


def private_memory() -> int:
    """Bytes of this process that are not pages of some file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024
