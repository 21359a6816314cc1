"""Where tokenizers come from."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import ScriptedServer
from tinkex.clients.service import ServiceClient
from tinkex.errors import ConfigError, SetupError
from tinkex.testing import Reply, Request, reply
from tinkex.tokenizers import clear_tokenizer_cache, hub_name, prefer_light, tokenizer_from_directory
from tinkex.tokenizers.light import LightTokenizer
from tinkex.tokenizers.loading import MAX_CACHED


def serving_files(directory: Path) -> ScriptedServer:
    """A server that hands out the tokenizer files of a model it calls 'toy'."""

    def file(_: Any, request: Request) -> Reply:
        assert request.query == {"model": "toy"}
        path = directory / request.path.rpartition("/")[2]
        return Reply(200, {}, path.read_bytes()) if path.is_file() else reply({"detail": "no"}, status=404)

    return ScriptedServer(tokenizer_file=file)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    return tmp_path


def service_on(server: ScriptedServer, host: str) -> ServiceClient:
    return ServiceClient(transport=server.transport, base_url=f"http://{host}", api_key="tml-x")


@pytest.mark.slow
def test_a_model_directory_on_this_machine_is_used_as_it_is(tiny_model: Path) -> None:
    server = ScriptedServer()
    server.answers["get_info"] = lambda value, _: reply(
        {"model_data": {"model_name": "toy", "tokenizer_id": str(tiny_model)}, "model_id": value.model_id}
    )
    with service_on(server, "one") as service:
        tokenizer = service.create_lora_training_client("toy").get_tokenizer().result()
    assert tokenizer is tokenizer_from_directory(tiny_model)
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"
    assert "tokenizer_file" not in server.names()


@pytest.mark.slow
def test_a_server_of_one_s_own_gives_its_files_once(home: Path, tiny_model: Path) -> None:
    server = serving_files(tiny_model)
    with service_on(server, "two") as service:
        sampler = service.create_sampling_client(base_model="toy")
        tokenizer = sampler.get_tokenizer().result()
        fetched = server.names().count("tokenizer_file")
        assert fetched > 1
        assert sampler.get_tokenizer().result() is tokenizer
        training = service.create_lora_training_client("toy")
        assert training.get_tokenizer().result() is tokenizer
        assert server.names().count("tokenizer_file") == fetched
    expected = tokenizer_from_directory(tiny_model)
    assert tokenizer.encode("hello world") == expected.encode("hello world")
    stored = list((home / "tokenizers").iterdir())
    assert len(stored) == 1
    assert (stored[0] / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("has_transformers", [True, False])
def test_the_error_for_a_name_without_a_tokenizer_says_what_to_do(
    tmp_path: Path, has_transformers: bool
) -> None:
    program = f"""
    import sys
    if not {has_transformers}:
        sys.modules["transformers"] = None  # as if it were not installed
    from tests.scripted import ScriptedServer
    from tinkex.errors import ConfigError, SetupError
    from tinkex.testing import reply
    import tinkex
    server = ScriptedServer(tokenizer_file=lambda *_: reply({{"detail": "no"}}, status=404))
    with tinkex.ServiceClient(transport=server.transport, base_url="http://x", api_key="tml-x") as service:
        try:
            service.create_sampling_client(base_model="toy").get_tokenizer()
        except SetupError as error:
            print(error)
    """
    # The hub's library reads at import whether it may use the network.
    said = run(program, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), TINKEX_HOME=str(tmp_path))
    assert "no tokenizer for 'toy'" in said
    assert "model directory" in said


def test_a_server_that_names_no_model_is_an_error_that_says_so(home: Path) -> None:
    server = ScriptedServer()
    server.answers["get_info"] = lambda value, _: reply({"model_data": {}, "model_id": value.model_id})
    with (
        service_on(server, "four") as service,
        pytest.raises(SetupError, match="does not report a tokenizer"),
    ):
        service.create_lora_training_client("toy").get_tokenizer()


@pytest.mark.parametrize(
    ("model", "repository"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:peft:262144", "Qwen/Qwen3-8B"),
        ("org/model/variant", "org/model"),
        ("meta-llama/Llama-3.1-8B", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
    ],
)
def test_model_names_lead_to_hub_repositories(model: str, repository: str) -> None:
    assert hub_name(model) == repository


@pytest.mark.slow
def test_without_transformers_the_light_tokenizer_is_returned(tiny_model: Path) -> None:
    program = f"""
    import sys
    sys.modules["transformers"] = None  # as if it were not installed
    from pathlib import Path
    from tinkex.tokenizers import tokenizer_from_directory
    tokenizer = tokenizer_from_directory(Path({str(tiny_model)!r}))
    print(type(tokenizer).__name__, tokenizer.decode(tokenizer.encode("hi", add_special_tokens=False)))
    """
    assert run(program) == "LightTokenizer hi\n"


def run(program: str, **environment: str) -> str:
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[3],
        env={**os.environ, **environment},
    )
    assert out.returncode == 0, out.stderr
    return out.stdout


@pytest.mark.slow
def test_a_process_that_loads_many_tokenizers_keeps_the_newest(tiny_model: Path, tmp_path: Path) -> None:
    clear_tokenizer_cache()
    links = [tmp_path / str(number) for number in range(MAX_CACHED + 1)]
    for link in links:
        link.mkdir()
        (link / "tokenizer.json").write_text((tiny_model / "tokenizer.json").read_text())
    try:
        oldest, second, *_ = [tokenizer_from_directory(link) for link in links]
        assert tokenizer_from_directory(links[1]) is second
        assert tokenizer_from_directory(links[0]) is not oldest
    finally:
        clear_tokenizer_cache()


@pytest.mark.slow
def test_light_tokenizers_can_be_requested(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKEX_TOKENIZERS", raising=False)
    prefer_light(light=False)
    usual = tokenizer_from_directory(tiny_model)
    assert not isinstance(usual, LightTokenizer)
    monkeypatch.setenv("TINKEX_TOKENIZERS", "light")
    light = tokenizer_from_directory(tiny_model)
    assert isinstance(light, LightTokenizer)
    assert light.encode("The sea") == usual.encode("The sea")
    monkeypatch.setenv("TINKEX_TOKENIZERS", "heavy")
    with pytest.raises(ConfigError, match="TINKEX_TOKENIZERS must be 'auto' or 'light'"):
        tokenizer_from_directory(tiny_model)
    monkeypatch.delenv("TINKEX_TOKENIZERS")
    prefer_light()
    try:
        assert tokenizer_from_directory(tiny_model) is light
    finally:
        prefer_light(light=False)
    assert tokenizer_from_directory(tiny_model) is usual
