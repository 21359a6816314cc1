"""Invalid requests to the routes of other protocols are rejected in their form, never with a 5xx."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.chat_templates import write_chat_models
from tests.engines import started_engine
from tests.fuzz.bodies import generated, mutated_bytes, mutated_object
from tests.fuzz.test_endpoints import FUZZ, HEADERS, still_serves
from tests.unit.engine.api.asgi import Answer, Client
from tinkex.engine.api.app import build_app
from tinkex.engine.api.compatible.routes import ROUTES
from tinkex.engine.api.dialects import Route
from tinkex.engine.config import EngineConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fuzzed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of an engine whose model has a template with tools."""
    home = tmp_path_factory.mktemp("fuzzed-routes")
    models = {"tiny": write_chat_models(tiny_model, home)["hermes"]}
    config = EngineConfig(home=home, models=models, max_body_bytes=300_000, max_samples_per_request=8)
    with started_engine(config) as engine:
        yield Client(build_app(engine), engine.api_key)


POSTED = [dataclasses.replace(route, path=route.paths[-1]) for route in ROUTES if route.method == "POST"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLING = {
    "model": "tiny",
    "n": 2,
    "stop": ["a"],
    "seed": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "stream": False,
    "return_token_ids": True,
    "user": "u",
    "metadata": {"a": "b"},
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "openai_completions": [
        {**SAMPLING, "prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 2},
        {**SAMPLING, "prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"model": "tiny", "prompt": "a", "max_tokens": 2, "structured_output": {"regex": "[ab]+"}},
    ],
    "openai_chat": [
        {
            **SAMPLING,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
                {"role": "tool", "content": "t", "tool_call_id": "c"},
            ],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "chat_template_kwargs": {"a": 1},
        },
        {
            **SAMPLING,
            "messages": [{"role": "user", "content": "u"}],
            "max_tokens": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        },
        {
            **SAMPLING,
            "messages": [{"role": "user", "content": "u"}],
            "max_tokens": 3,
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
            "tool_choice": "auto",
        },
    ],
    "anthropic_messages": [
        {
            "model": "tiny",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "u"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r", "is_error": True}]},
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["a"],
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 5,
            "stream": True,
        },
        {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "u"}], "thinking": {"type": "disabled"}},
    ],
    "anthropic_count_tokens": [{"model": "tiny", "messages": [{"role": "user", "content": "u"}], "system": "s"}],
}  # fmt: skip


def send(client: Client, route: Route, body: bytes, headers: dict[str, str] | None = None) -> Answer:
    async def call() -> Answer:
        return await asyncio.wait_for(client.acall(route.method, route.path, body, headers), 60)

    answer = asyncio.run(call())
    assert answer.status < 500 or answer.status == 503, (answer.status, answer.body, body[:300])
    if answer.status >= 400:
        assert answer.json["error"]["message"]
        assert ("type" in answer.json) == route.name.startswith("anthropic")
    elif b'"error"' in answer.body and answer.headers["content-type"].startswith("text/event-stream"):
        last = json.loads(answer.body.strip().splitlines()[-1].removeprefix(b"data: "))
        assert "server" not in str(last["error"]["type"]), (answer.body, body[:300])
    return answer


@pytest.mark.parametrize("route", POSTED, ids=lambda route: route.name)
def test_generated_bodies_never_make_the_server_fail(route: Route, fuzzed: Client) -> None:
    @FUZZ
    @given(generated(route), HEADERS)
    def check(body: bytes, headers: dict[str, str]) -> None:
        send(fuzzed, route, body, headers)

    check()


@pytest.mark.parametrize("route", POSTED, ids=lambda route: route.name)
def test_mutated_bodies_never_make_the_server_fail(route: Route, fuzzed: Client) -> None:
    for body in BODIES[route.name]:

        @FUZZ
        @given(mutated_object(body) | mutated_bytes(json.dumps(body).encode()))
        def check(changed: bytes) -> None:
            send(fuzzed, route, changed)

        check()
    still_serves(fuzzed)
