from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import tinkex
from tests.servers import ServedEngine
from tests.unit.checkpoints.cutting_proxy import CuttingProxy, cutting_proxy
from tinkex._transport.retry import RetryPolicy
from tinkex.checkpoints import download_checkpoint, upload_checkpoint
from tinkex.checkpoints.upload import AdapterFiles
from tinkex.config import Config
from tinkex.errors import APIConnectionError, BadRequestError, NotFoundError, SetupError
from tinkex.types import LoraConfig

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::tinkex.errors.ExperimentalWarning")]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CUT = 1_200_000
NO_RETRIES = RetryPolicy(max_retries=0)


@pytest.fixture(scope="module")
def config(served_engine: ServedEngine) -> Config:
    return Config(base_url=served_engine.url, api_key=served_engine.key)


@pytest.fixture(scope="module")
def downloaded(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with tinkex.ServiceClient(config=config) as service:
        path = service.create_lora_training_client("tiny/llama", rank=128).save_state("a").result().path
    return download_checkpoint(path, tmp_path_factory.mktemp("download"), config=config).directory


@pytest.fixture
def adapter(downloaded: Path, tmp_path: Path) -> Path:
    """A PEFT directory of about 1.4 MB: a server may drop what it has not read when a connection breaks off."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    for name in (CONFIG, WEIGHTS):
        (directory / name).write_bytes((downloaded / name).read_bytes())
    return directory


@pytest.fixture
def proxy(config: Config) -> Iterator[CuttingProxy]:
    with cutting_proxy(config.base_url) as opened:
        yield opened


def through(proxy: CuttingProxy, config: Config) -> Config:
    return Config(base_url=proxy.url, api_key=config.api_key)


def state_file(adapter: Path) -> Path:
    return adapter.parent / ".adapter.upload.json"


def base_model_of(config: Config, path: str) -> str:
    return tinkex.RestClient(config=config).get_weights_info_by_tinker_path(path).result().base_model


def test_an_adapter_becomes_a_checkpoint_with_its_tensors(
    config: Config, adapter: Path, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    uploaded = upload_checkpoint(str(adapter), config=config, progress=lambda *each: seen.append(each))
    size = (adapter / WEIGHTS).stat().st_size
    assert {(CONFIG, 0), (WEIGHTS, 0), (WEIGHTS, size)} <= {each[:2] for each in seen}
    assert uploaded.num_bytes == size + (adapter / CONFIG).stat().st_size
    assert not state_file(adapter).exists()
    again = download_checkpoint(uploaded.checkpoint_path, tmp_path, config=config).directory
    ours, theirs = load_file(adapter / WEIGHTS), load_file(again / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_an_upload_that_breaks_off_is_continued_where_it_did(
    config: Config, adapter: Path, proxy: CuttingProxy
) -> None:
    size = (adapter / WEIGHTS).stat().st_size
    proxy.cut_after = [100_000, CUT]  # the config passes whole
    path = upload_checkpoint(adapter, config=through(proxy, config)).checkpoint_path
    assert base_model_of(config, path) == "tiny/llama"
    assert len(proxy.sent) == 3
    assert proxy.sent[1] == CUT
    assert proxy.sent[2] < size - CUT // 4, "what the server had was not sent again"


def test_an_interrupted_upload_is_resumed_by_the_next_call(
    config: Config, adapter: Path, proxy: CuttingProxy
) -> None:
    proxy.cut_after = [100_000, CUT]
    config = through(proxy, config)
    with pytest.raises(APIConnectionError, match="Run the same command again to resume it"):
        upload_checkpoint(adapter, config=config, policy=NO_RETRIES)
    assert stat.S_IMODE(state_file(adapter).stat().st_mode) == 0o600, "its URLs are signed"
    upload_id = json.loads(state_file(adapter).read_text())["upload_id"]
    path = upload_checkpoint(adapter, config=config, policy=NO_RETRIES).checkpoint_path
    assert not state_file(adapter).exists()
    assert len(proxy.sent) == 3, "the config was not sent again"
    rest = tinkex.RestClient(config=config)
    assert rest.external_weights_upload_finish(upload_id).result().tinker_path == path, "the same upload"


def test_an_upload_that_was_cancelled_or_of_other_files_is_started_again(
    config: Config, adapter: Path, proxy: CuttingProxy
) -> None:
    rest = tinkex.RestClient(config=config)
    for change in ("cancelled", "other files"):
        proxy.cut_after = [100_000, CUT]
        with pytest.raises(APIConnectionError):
            upload_checkpoint(adapter, config=through(proxy, config), policy=NO_RETRIES)
        upload_id = json.loads(state_file(adapter).read_text())["upload_id"]
        if change == "cancelled":
            rest.external_weights_upload_cancel(upload_id).result()
        else:
            tensors = load_file(adapter / WEIGHTS)
            save_file({name: tensor * 2 for name, tensor in tensors.items()}, adapter / WEIGHTS)
        assert upload_checkpoint(adapter, config=through(proxy, config)).checkpoint_path
        if change == "other files":
            rest.external_weights_upload_cancel(upload_id).result()
        with pytest.raises(NotFoundError):
            rest.external_weights_upload_finish(upload_id).result()


def test_a_rejected_adapter_is_named_and_can_be_uploaded_again(config: Config, adapter: Path) -> None:
    whole = (adapter / WEIGHTS).read_bytes()
    tensors = load_file(adapter / WEIGHTS)
    next(iter(tensors.values()))[:] = float("inf")
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(BadRequestError, match=f"{WEIGHTS}: it has weights that are not finite"):
        upload_checkpoint(adapter, config=config)
    assert not state_file(adapter).exists()
    (adapter / WEIGHTS).write_bytes(whole)
    assert upload_checkpoint(adapter, config=config).checkpoint_path


def test_another_base_model_than_the_adapter_names_can_be_given(config: Config, adapter: Path) -> None:
    changed = json.loads((adapter / CONFIG).read_text()) | {"base_model_name_or_path": "elsewhere/model"}
    (adapter / CONFIG).write_text(json.dumps(changed))
    with pytest.raises(NotFoundError, match="elsewhere/model"):
        upload_checkpoint(adapter, config=config)
    path = upload_checkpoint(adapter, config=config, base_model="tiny/llama").checkpoint_path
    assert base_model_of(config, path) == "tiny/llama"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({CONFIG: None}, "is not a PEFT adapter: it has no adapter_config.json"),
        ({WEIGHTS: None}, "only safetensors adapters can be uploaded"),
        ({CONFIG: b"[]"}, "is not the config of a LoRA adapter"),
        ({CONFIG: b"{"}, "cannot be read"),
        ({CONFIG: b"{}"}, "has no rank"),
        ({WEIGHTS: b"short"}, "cannot be read as safetensors"),
        ({WEIGHTS: b"\xff" * 100}, "is not a safetensors file"),
        ({WEIGHTS: b"\x02\0\0\0\0\0\0\0{}"}, "has no LoRA weights"),
    ],
)
def test_a_directory_that_is_not_an_adapter_is_rejected_before_anything_is_sent(
    adapter: Path, change: dict[str, Any], words: str
) -> None:
    for name, content in change.items():
        (adapter / name).unlink()
        if content is not None:
            (adapter / name).write_bytes(content)
    with pytest.raises(SetupError, match=words):
        upload_checkpoint(adapter, base_url="http://127.0.0.1:1", api_key="tml-none")


def test_the_settings_of_an_adapter_are_read_from_its_files(adapter: Path) -> None:
    assert AdapterFiles.read(adapter).lora == LoraConfig(rank=128)
    changed = json.loads((adapter / CONFIG).read_text()) | {"rank_pattern": {"q_proj": 160}}
    (adapter / CONFIG).write_text(json.dumps(changed))
    tensors = {name: value for name, value in load_file(adapter / WEIGHTS).items() if ".mlp." not in name}
    save_file(tensors, adapter / WEIGHTS)
    assert AdapterFiles.read(adapter).lora == LoraConfig(rank=160, train_mlp=False)
