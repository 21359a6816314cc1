"""Required tool calls and JSON answers: structured output makes them valid, whatever the model would rather say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chat_templates import write_chat_models
from tests.engines import started_engine
from tests.unit.engine.api.asgi import Client
from tests.unit.engine.api.test_anthropic import ask, events
from tests.unit.engine.api.test_openai_chat import HELLO, chat, chat_engine, chunks, cleo, error, prompt_text
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine

pytestmark = pytest.mark.slow

__all__ = ["chat_engine", "cleo"]  # fixtures

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
FORECAST = {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS, "strict": True}}
NOTHING = {"type": "function", "function": {"name": "nothing"}}
NAMED = {"type": "function", "function": {"name": "forecast"}}


@pytest.mark.parametrize("model", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_required_call_is_made_in_every_format(cleo: Client, model: str, choice: Any) -> None:
    asked: dict[str, Any] = {
        "tools": [FORECAST, NOTHING],
        "tool_choice": choice,
        "max_completion_tokens": 200,
        "n": 3,
    }
    answer = chat(cleo, model, **asked)
    assert answer.status == 200, answer.body
    streamed = chunks(chat(cleo, model, stream=True, **asked))
    for number, found in enumerate(answer.json["choices"]):
        assert found["finish_reason"] == "tool_calls"
        assert found["message"]["content"] is None
        (call,) = found["message"]["tool_calls"]
        check_call(call["function"]["name"], json.loads(call["function"]["arguments"]), choice is NAMED)
        deltas = [c["choices"][0]["delta"] for c in streamed if c["choices"][0]["index"] == number]
        (again,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert again["function"] == call["function"]
        assert (len(call["id"]) == 9) == (model == "mistral")


def check_call(name: str, arguments: dict[str, Any], is_named: bool) -> None:
    assert name in ({"forecast"} if is_named else {"forecast", "nothing"})
    if name == "forecast":
        assert arguments["unit"] in {"C", "F"}
        assert arguments["days"] in range(10)
        assert set(arguments) == {"unit", "days"}


def test_a_required_call_passes_only_declared_parameters(cleo: Client) -> None:
    parameters = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    asked: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "max_completion_tokens": 200, "n": 8}
    for choice in chat(cleo, "hermes", **asked).json["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"warm"}


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "forecast"}], ids=["any", "tool"]
)
def test_a_required_tool_is_used_on_the_anthropic_route(cleo: Client, choice: dict[str, str]) -> None:
    tools = [{"name": "forecast", "input_schema": PARAMETERS}]
    asked: dict[str, Any] = {"tools": tools, "tool_choice": choice, "max_tokens": 200}
    answer = ask(cleo, "hermes", **asked).json
    (block,) = answer["content"]
    assert (block["type"], answer["stop_reason"]) == ("tool_use", "tool_use")
    check_call(block["name"], block["input"], is_named=True)
    streamed = events(ask(cleo, "hermes", stream=True, **asked))
    started = next(event for event in streamed if event["type"] == "content_block_start")
    assert started["content_block"]["name"] == "forecast"
    (delta,) = [event["delta"] for event in streamed if event["type"] == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == block["input"]


@pytest.mark.parametrize("model", ["tiny", "thinking", "always-thinking"])
def test_a_json_schema_is_followed_also_by_models_that_think(cleo: Client, model: str) -> None:
    schema = {"name": "forecast", "schema": PARAMETERS, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = chat(cleo, model, response_format=form, max_completion_tokens=200, n=3)
    assert answer.status == 200, answer.body
    for found in answer.json["choices"]:
        check_call("forecast", json.loads(found["message"]["content"]), is_named=True)
        assert found["finish_reason"] == "stop"
    text = ask(
        cleo, model, max_tokens=200, output_config={"format": {"type": "json_schema", "schema": PARAMETERS}}
    )
    check_call("forecast", json.loads(text.json["content"][0]["text"]), is_named=True)


def test_thoughts_before_a_json_answer_are_rejected(cleo: Client) -> None:
    answer = chat(cleo, "thinking", response_format={"type": "json_object"}, reasoning_effort="high")
    assert (answer.status, error(answer)["param"]) == (400, "reasoning_effort")
    form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    for fields in ({"thinking": {"type": "enabled"}}, {"output_config": {"effort": "high"}}):
        both = {"output_config": form, **fields}
        both["output_config"] = {**form, **both["output_config"]}
        assert ask(cleo, "thinking", **both).status == 400


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(red|green)(, (red|green)){1,2}"}, "(red|green)(, (red|green)){1,2}"),
    ({"grammar": 'start: digit ("+" digit)~1..2\ndigit: /[0-9]/'}, r"[0-9](\+[0-9]){1,2}"),
    ({"json_schema": {"enum": ["a", "b"]}}, '"[ab]"'),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=lambda each: next(iter(each)))
def test_the_forms_of_the_native_api_are_followed(cleo: Client, form: dict[str, Any], pattern: str) -> None:
    body = {"model": "tiny", "prompt": "A", "max_tokens": 60, "n": 4, "seed": 3, "structured_output": form}
    completed = cleo.call("POST", "/v1/completions", body)
    answered = chat(cleo, "always-thinking", structured_output=form, max_completion_tokens=60, n=4)
    assert completed.status == answered.status == 200
    texts = [choice["text"] for choice in completed.json["choices"]]
    texts += [choice["message"]["content"] for choice in answered.json["choices"]]
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_a_form_that_cannot_be_followed_is_a_400(cleo: Client) -> None:
    for form in ({}, {"regex": "("}, {"regex": "a", "grammar": "start: /a/"}, {"grammar": "start: nothing"}):
        body = {"model": "tiny", "prompt": "A", "max_tokens": 4, "structured_output": form}
        for answer in (cleo.call("POST", "/v1/completions", body), chat(cleo, structured_output=form)):
            assert answer.status == 400
            assert error(answer)["param"] == "structured_output"
            assert error(answer)["message"].startswith("structured_output")
    both = chat(cleo, structured_output={"regex": "a"}, response_format={"type": "json_object"})
    assert error(both)["param"] == "structured_output"
    called = chat(cleo, "hermes", structured_output={"regex": "a"}, tools=[NOTHING])
    assert error(called)["param"] == "structured_output"
    thoughtful = chat(cleo, "thinking", structured_output={"regex": "a"}, reasoning_effort="high")
    assert error(thoughtful)["param"] == "reasoning_effort"


def test_a_json_object_is_an_object(cleo: Client) -> None:
    for seed in range(6):
        answer = chat(
            cleo,
            response_format={"type": "json_object"},
            max_completion_tokens=300,
            seed=seed,
            temperature=0.3,
        ).json["choices"][0]
        if answer["finish_reason"] == "stop":
            assert isinstance(json.loads(answer["message"]["content"]), dict)
        else:
            assert answer["message"]["content"].lstrip().startswith("{")


def test_a_schema_that_is_not_supported_is_a_400(cleo: Client) -> None:
    for schema in ({"type": "no such type"}, {"not": {"type": "string"}}, {"$ref": "https://elsewhere/x"}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = chat(cleo, response_format=form)
        assert answer.status == 400, schema
        assert error(answer)["param"] == "response_format.json_schema.schema"
        assert error(answer)["message"].startswith("response_format.json_schema.schema ")
        output = {"format": {"type": "json_schema", "schema": schema}}
        assert "output_config.format.schema " in error(ask(cleo, "tiny", output_config=output))["message"]
        function = {"name": "f", "parameters": {"properties": {"a": schema}}}
        forced = chat(
            cleo, "hermes", tools=[{"type": "function", "function": function}], tool_choice="required"
        )
        assert error(forced)["param"] == "tools"


def test_the_model_reads_how_a_required_call_starts(cleo: Client, chat_engine: Engine) -> None:
    for model, start in (
        ("hermes", "<tool_call>\n"),
        ("mistral", "[TOOL_CALLS]["),
        ("llama3", "assistant\n"),
    ):
        answer = chat(cleo, model, HELLO, tools=[NOTHING], tool_choice="required", return_token_ids=True)
        assert prompt_text(chat_engine, model, answer).endswith(start)


def test_sampling_options_of_the_openai_protocol_are_native_ones(cleo: Client) -> None:
    fields: dict[str, Any] = {"min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    fields |= {"repetition_penalty": 1.2, "temperature": 0.8}
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "seed": 3, "return_token_ids": True}
    routed = cleo.call("POST", "/v1/completions", {**body, **fields, "logit_bias": {"9": 3}}).json
    native = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 12, "seed": 3, **fields, "logit_bias": {"9": 3}},
        "base_model": "tiny",
    }
    result = cleo.result(cleo.post("asample", native), accept="application/json").json
    assert routed["choices"][0]["token_ids"] == result["sequences"][0]["tokens"]
    banned = cleo.call("POST", "/v1/completions", {**body, "temperature": 0, "logit_bias": {"9": 100}}).json
    assert set(banned["choices"][0]["token_ids"]) == {9}


def test_a_grammar_that_becomes_too_complex_is_named_as_the_client_s_field(cleo: Client) -> None:
    hostile = {"regex": "(\\p{L}|\\p{N}|\\p{P})*" * 200}
    answer = chat(cleo, structured_output=hostile, max_completion_tokens=60)
    assert (answer.status, error(answer)["param"]) == (400, "structured_output")
    streamed = chat(cleo, structured_output=hostile, max_completion_tokens=60, stream=True)
    last = json.loads(streamed.body.strip().splitlines()[-1].removeprefix(b"data: "))
    assert last["error"]["param"] == "structured_output"


def test_without_the_extra_the_field_that_needs_it_is_rejected(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # importing it fails as if it were not installed
    models = write_chat_models(tiny_model, tmp_path)
    with started_engine(EngineConfig(home=tmp_path / "home", models=models)) as engine:
        client = Client(build_app(engine), engine.api_key)
        for fields, field in (
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"structured_output": {"regex": "a"}}, "structured_output"),
            ({"tools": [NOTHING], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [FORECAST]}, "tools"),
        ):
            for stream in (False, True):
                answer = chat(client, "hermes", stream=stream, **fields)
                assert (answer.status, error(answer)["param"]) == (400, field)
                assert error(answer)["message"].startswith(f"{field} needs llguidance")
        tools = [{"name": "f", "input_schema": {}}]
        answer = ask(client, "hermes", tools=tools, tool_choice={"type": "any"})
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith("tool_choice needs llguidance")
        assert chat(client, "hermes", tools=[NOTHING]).status == 200
