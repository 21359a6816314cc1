"""Programs of other people's clients, unmodified, against ``tinkex serve``."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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


HONOURED = {
    "completions": """prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
        stream_options stream_options.include_usage temperature top_p stream""",
    "chat/completions": """messages messages.content messages.content.text messages.content.type messages.role
        messages.tool_calls messages.tool_calls.id messages.tool_calls.function messages.tool_calls.function.arguments
        messages.tool_calls.function.name messages.tool_calls.type messages.tool_call_id frequency_penalty logit_bias
        logprobs max_completion_tokens max_tokens n presence_penalty reasoning_effort response_format
        response_format.type response_format.json_schema response_format.json_schema.name
        response_format.json_schema.schema response_format.json_schema.strict seed stop stream_options
        stream_options.include_usage temperature tool_choice tool_choice.function tool_choice.function.name
        tool_choice.type tools tools.function tools.function.name tools.function.description
        tools.function.parameters tools.function.strict tools.type top_logprobs top_p stream""",
    "messages": """max_tokens messages messages.content messages.content.text messages.content.type
        messages.content.tool_use_id messages.content.content messages.content.content.text
        messages.content.content.type messages.content.is_error messages.content.thinking messages.content.id
        messages.content.input messages.content.name messages.role output_config output_config.format
        output_config.format.schema output_config.format.type stop_sequences system system.text system.type thinking
        thinking.type tool_choice tool_choice.type tool_choice.name tools tools.input_schema tools.input_schema.type
        tools.input_schema.properties tools.input_schema.required tools.name tools.description tools.strict tools.type
        stream""",
}
"""The fields with an effect; other tests show it."""
HONOURED["messages/count_tokens"] = HONOURED["messages"]
NO_EFFECT = """user metadata metadata.user_id store parallel_tool_calls response_format.json_schema.description
    cache_control cache_control.type cache_control.ttl thinking.budget_tokens
    tool_choice.disable_parallel_tool_use tools.eager_input_streaming signature caller"""
"""Fields, or ends of their paths, that the header names."""


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_every_field_of_a_protocol_is_honoured_or_rejected_or_named(served: Served, client: str) -> None:
    connection = HTTPConnection(urlsplit(served.engine.url).netloc, timeout=60)
    headers = {"Authorization": f"Bearer {served.engine.key}", "Content-Type": "application/json"}
    found: dict[str, set[str]] = {}
    try:
        for each in run_python(client, None, client, program="request_fields"):
            route, field = each["route"], each["field"]
            if route == "messages/count_tokens" and "." in field:
                continue  # the types are those of messages
            connection.request(
                "POST", f"/v1/{route}", json.dumps(_complete(route, field, each["body"])), headers
            )
            response = connection.getresponse()
            body = response.read()
            if response.status == 200:
                ignored = response.headers["x-tinkex-ignored-fields"] or ""
                is_named = any(name in field or field in name for name in ignored.split(", ") if name)
                found.setdefault(field, set()).add("named" if is_named else "honoured")
                known = (
                    is_named if field.endswith(tuple(NO_EFFECT.split())) else field in HONOURED[route].split()
                )
                assert known, (each, body)
                continue
            assert response.status == 400, (each, body)
            error = json.loads(body)["error"]
            named = re.sub(r"\[\d*\]", "", error.get("param") or error["message"].split()[0].rstrip(":"))
            assert field.startswith(named.rpartition(".")[0] or named), (each, error)
            found.setdefault(field, set()).add("rejected")
    finally:
        connection.close()
    assert len(found) > 130
    for results in ({"rejected"}, {"honoured"}, {"named"}):
        assert results in found.values()


def _complete(route: str, field: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body with what its other fields need."""
    body |= {"model": "hermes"}
    if "messages" in body:  # an answer of the assistant would be continued
        body["messages"] = [*body["messages"], {"role": "user", "content": "Hello"}]
    if route == "chat/completions":
        body["max_completion_tokens"] = 1
        if field.startswith("top_logprobs"):
            body["logprobs"] = True
    if field.startswith("stream_options"):
        body["stream"] = True
    if field.startswith("tool_choice"):
        tool: dict[str, Any] = {"name": "{}", "input_schema": {"type": "object"}}
        body["tools"] = [{"type": "function", "function": {"name": "{}"}} if "chat" in route else tool]
    return body


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
