from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.servers import ServedEngine
from tinkex import types
from tinkex.checkpoints import download_checkpoint
from tinkex.checkpoints.download import verify
from tinkex.config import Config
from tinkex.errors import NotFoundError, SetupError


@pytest.fixture(scope="module")
def config(served_engine: ServedEngine) -> Config:
    return Config(base_url=served_engine.url, api_key=served_engine.key)


@pytest.fixture(scope="module")
def saved(config: Config) -> dict[str, str]:
    """The paths of one state, saved in every form."""
    with tinkex.ServiceClient(config=config) as service:
        training = service.create_lora_training_client("tiny/llama", rank=4, seed=3)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs={"target_tokens": [6, 7, 8]}
        )
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        paths = {
            "training": training.save_state("state").result().path,
            "sampler": training.save_weights_for_sampler("sampler").result().path,
            "external": training.save_weights_external("external").result().path,
        }
    return {kind: str(path) for kind, path in paths.items()}


def tensors(directory: Path) -> dict[str, Any]:
    """The adapter, by the names of its tensors."""
    from safetensors.numpy import load_file

    read = load_file(directory / "adapter_model.safetensors")
    return {name: tensor.tolist() for name, tensor in read.items()}


def exports(config: Config) -> list[str]:
    listed = tinkex.RestClient(config=config).iter_user_checkpoints()
    return [one.tinker_path for one in listed if "/external_weights/download" in one.tinker_path]


@pytest.mark.slow
def test_every_kind_arrives_as_the_same_adapter(
    config: Config, saved: dict[str, str], tmp_path: Path
) -> None:
    found = {kind: download_checkpoint(path, str(tmp_path), config=config) for kind, path in saved.items()}
    first, *others = (tensors(one.directory) for one in found.values())
    assert all(other == first for other in others)
    run, kind, name = saved["training"].removeprefix("tinker://").split("/")
    assert found["training"].directory == tmp_path / f"{run.replace(':', '_')}_{kind}_{name}"
    size = sum(file.stat().st_size for file in found["training"].directory.iterdir())
    assert found["training"].num_bytes == size
    assert not list(tmp_path.glob(".*"))
    assert (found["training"].directory / "optimizer.safetensors").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_what_is_downloaded_gives_the_same_logprobs_in_peft(
    config: Config, saved: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    tokens = [5, 6, 7, 8, 9, 10]
    with tinkex.ServiceClient(config=config) as service:
        sampler = service.create_sampling_client(model_path=saved["sampler"])
        said = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
        plain = service.create_sampling_client(base_model="tiny/llama")
        without = plain.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
    found = download_checkpoint(saved["training"], tmp_path, config=config)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, found.directory).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    wanted = logprobs[range(len(tokens) - 1), tokens[1:]].tolist()
    assert said == pytest.approx(wanted, abs=1e-4)
    assert without != pytest.approx(wanted, abs=1e-2)


def test_the_official_way_exports_fetches_and_deletes_the_export(
    config: Config, saved: dict[str, str], tmp_path: Path
) -> None:
    archive = download_checkpoint(saved["training"], tmp_path / "a", config=config)
    export = download_checkpoint(saved["training"], tmp_path / "b", config=config, route="export")
    assert tensors(export.directory) == tensors(archive.directory)
    assert sorted(file.name for file in export.directory.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert exports(config) == []
    with pytest.raises(SetupError, match="training checkpoint"):
        download_checkpoint(saved["sampler"], tmp_path, config=config, route="export")


def test_an_interrupted_export_is_resumed(config: Config, saved: dict[str, str], tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int | None) -> None:
        if what == "adapter_model.safetensors":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_checkpoint(saved["training"], tmp_path, config=config, route="export", progress=stop)
    left = exports(config)
    assert len(left) == 1
    (work,) = tmp_path.glob(".*.partial")
    assert json.loads((work / "state.json").read_text())["export"] == left[0]
    assert (work / "files" / "adapter_config.json").exists()
    reports: list[str] = []
    download_checkpoint(
        saved["training"],
        tmp_path,
        config=config,
        route="export",
        progress=lambda what, *_: reports.append(what),
    )
    assert "adapter_config.json" not in reports
    assert exports(config) == []
    assert not list(tmp_path.glob(".*"))


def test_an_existing_directory_is_kept_until_the_new_one_is_complete(
    config: Config, saved: dict[str, str], tmp_path: Path
) -> None:
    directory = download_checkpoint(saved["training"], tmp_path, config=config).directory
    (directory / "mine.txt").write_text("x")
    with pytest.raises(SetupError, match="already exists"):
        download_checkpoint(saved["training"], tmp_path, config=config)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_checkpoint(saved["training"], tmp_path, config=config, force=True, progress=stop)
    assert (directory / "mine.txt").exists()
    download_checkpoint(saved["training"], tmp_path, config=config, force=True)
    assert not (directory / "mine.txt").exists()
    assert tensors(directory)


def test_a_checkpoint_that_is_not_there_is_a_typed_error(config: Config, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        download_checkpoint("tinker://nobody:train:0/weights/x", tmp_path, config=config)
    with pytest.raises(SetupError, match="starts with 'nobody'"):
        download_checkpoint("nobody", tmp_path, config=config)
    assert list(tmp_path.iterdir()) == [], "nothing to resume from is left"


def test_corruption_is_found_by_the_manifest_and_by_the_headers_of_tensors(
    config: Config, saved: dict[str, str], tmp_path: Path
) -> None:
    directory = download_checkpoint(saved["training"], tmp_path, config=config).directory
    file = directory / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SetupError, match="manifest"):
        verify(directory)
    (directory / "manifest.json").unlink()
    verify(directory)
    for damaged, said in (
        (content[:-1], "according to its header"),
        (content[:4], "truncated"),
        (b"", "truncated"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(SetupError, match=said):
            verify(directory)
    file.write_bytes(struct.pack("<Q", 4) + b"nope")
    with pytest.raises(SetupError, match="not a safetensors file"):
        verify(directory)


def test_an_interrupted_archive_of_our_server_is_resumed(
    config: Config, saved: dict[str, str], tmp_path: Path
) -> None:
    def stop_at_the_end(_: str, done: int, total: int | None) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_checkpoint(saved["training"], tmp_path, config=config, progress=stop_at_the_end)
    (part,) = tmp_path.glob(".*.partial/archive.tar.part")
    half = part.stat().st_size // 2
    with part.open("rb+") as file:
        file.truncate(half)
    reports: list[int] = []
    found = download_checkpoint(
        saved["training"], tmp_path, config=config, progress=lambda _, done, __: reports.append(done)
    )
    assert reports[0] == half
    assert tensors(found.directory)


def test_a_checkpoint_of_the_embedded_engine_is_extracted_from_the_archive_that_the_engine_wrote(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKEX_MODELS", f"tiny/llama={tiny_model}")
    reported: list[tuple[str, int, int | None]] = []

    def look(name: str, done: int, total: int | None) -> None:
        reported.append((name, done, total))
        assert not list(tmp_path.glob(".*.partial/archive.tar*")), "there is no second copy of it"

    with tinkex.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client("tiny/llama", rank=4)
        path = str(training.save_state("kept").result().path)
        found = download_checkpoint(path, tmp_path, base_url="local", progress=look)
    assert verify(found.directory) == found.num_bytes
    assert (found.directory / "optimizer.safetensors").exists()
    assert [(done, total) for _, done, total in reported][-1] == (reported[-1][1], reported[-1][1])
    assert not list(tmp_path.glob(".*"))
