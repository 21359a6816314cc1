"""Programs of other people's clients, unmodified, against ``tinkex serve``."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.chat_templates import write_chat_models
from tests.models import tiny_llama
from tests.other_clients.environments import python_of, run_node, run_python
from tests.servers import ServedEngine, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first run installs the clients

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "openai.md"


@dataclass(frozen=True)
class Served:
    """A server of models with chat templates, and a checkpoint of one."""

    engine: ServedEngine
    checkpoint: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("other-clients")
    models = write_chat_models(tiny_llama(home / "tiny", context=2048), home)
    options = [text for name, path in models.items() for text in ("--model", f"{name}={path}")]
    with serve(home, *options) as engine:
        service = tinkex.ServiceClient(base_url=engine.url, api_key=engine.key)
        run = service.create_lora_training_client("hermes", rank=4)
        checkpoint = run.save_weights_for_sampler("first").result().path
        yield Served(engine, checkpoint)


def native(served: Served, prompt: str, **params: Any) -> tuple[list[int], str]:
    """The tokens of a sample of the client of this project, and their text."""
    service = tinkex.ServiceClient(base_url=served.engine.url, api_key=served.engine.key)
    client = service.create_sampling_client(base_model="hermes")
    tokenizer = client.get_tokenizer()
    asked = tinkex.types.ModelInput.from_ints(tokenizer.encode(prompt))
    (sequence,) = client.sample(asked, 1, tinkex.types.SamplingParams(**params)).result(60).sequences
    kept = sequence.tokens[: -1 if sequence.stop_reason == "stop" else None]
    return sequence.tokens, tokenizer.decode(kept)


def test_the_openai_package(served: Served) -> None:
    found = run_python("openai", served.engine, served.checkpoint)
    assert {"hermes", served.checkpoint} <= set(found["models"])
    assert found["retrieved"] == served.checkpoint
    tokens, text = native(served, "The quick", max_tokens=12, seed=5, top_k=50)
    assert found["tokens"] == tokens
    assert found["completion"] == found["streamed completion"] == text
    assert found["usage"]["completion_tokens"] == len(tokens)
    assert found["batch"] == 4
    assert found["chat"] == found["streamed chat"] == found["streamed by helper"]
    name, arguments, reason = found["call"]
    assert (name, reason) == ("weather", "tool_calls")
    assert arguments["days"] in range(10)
    assert set(found["parsed"]) == {"warm", "days"}
    assert found["errors"] == {
        "unknown model": ["NotFoundError", "model"],
        "best_of": ["BadRequestError", "best_of"],
        "too long": ["BadRequestError", "prompt"],
        "wrong key": "invalid_api_key",
    }
    assert found["ignored"] == "user, store"
    assert found["concurrent"] == 1


def test_the_anthropic_package(served: Served) -> None:
    found = run_python("anthropic", served.engine, served.checkpoint)
    assert found["message"] == found["streamed"]
    assert found["usage"] == [found["counted"], 12]
    assert found["prefilled"] == 3
    kind, name, arguments, reason = found["use"]
    assert (kind, name, reason) == ("tool_use", "weather", "tool_use")
    assert arguments["days"] in range(10)
    assert found["streamed use"] == "weather"
    assert (found["thoughts"], found["beta"]) == ("thinking", "assistant")
    assert found["errors"] == {
        "unknown model": ["NotFoundError", "not_found_error"],
        "tools": ["BadRequestError", "invalid_request_error"],
    }


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_the_programs_of_the_guide(served: Served, client: str) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(f"from {client} import")]
    for there, here in {
        "http://127.0.0.1:8787": served.engine.url,
        "tml-…": served.engine.key,
        "HuggingFaceTB/SmolLM2-135M-Instruct": "hermes",
    }.items():
        assert there in block
        block = block.replace(there, here)
    done = subprocess.run([python_of(client), "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_litellm(served: Served) -> None:
    found = run_python("litellm", served.engine, served.checkpoint)
    assert found["chat"] == found["streamed chat"]
    assert (found["usage"], found["anthropic"]) == (8, 5)
    assert found["text"]
    assert found["error"]


def test_langchain(served: Served) -> None:
    found = run_python("langchain", served.engine, served.checkpoint)
    assert found["chat"] == found["streamed chat"]
    assert (found["usage"], found["follow up"]) == (8, 3)
    assert found["text"]
    assert found["call"] == ["weather", ["days"]]
    assert found["structured"] == ["yes"]


def test_the_vercel_ai_sdk(served: Served) -> None:
    found = run_node("ai_sdk", served.engine, served.checkpoint)
    assert found["text"] == found["streamed text"]
    assert found["usage"] == found["streamed usage"] == found["anthropic"] == 8
    assert found["completion"] == "string"
    assert found["call"] == ["weather", ["days"]]
    assert found["object"] == ["days"]
    assert found["anthropic call"] == "weather"
    assert found["error"] == 404
