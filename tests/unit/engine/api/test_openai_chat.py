"""``/v1/chat/completions``: the model's template, every field honoured or rejected, and the text of the native sample."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from starlette.requests import Request

from tests.chat_templates import write_chat_models
from tests.engines import started_engine
from tests.models import tiny_llama
from tests.unit.engine.api.asgi import Answer, Client
from tests.unit.engine.api.test_openai_completions import chunks, error, save
from tinkex.engine.api.app import build_app
from tinkex.engine.api.call import Call
from tinkex.engine.api.compatible.replies import MAX_LOOP_VALUES, choices_reply
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.engine.store import LOCAL_USER

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def chat_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with a model for each chat template."""
    home = tmp_path_factory.mktemp("chats")
    roomy = tiny_llama(home / "roomy", context=2048)
    models = {"tiny": str(tiny_model), **write_chat_models(roomy, home)}
    config = EngineConfig(home=tmp_path_factory.mktemp("chat-home"), models=models, long_poll_s=0.25)
    with started_engine(config) as engine:
        yield engine


@pytest.fixture
def cleo(chat_engine: Engine) -> Client:
    return Client(build_app(chat_engine), chat_engine.api_key)


def chat(client: Client, model: str = "tiny", messages: Any = None, **fields: Any) -> Answer:
    body = {"model": model, "messages": HELLO if messages is None else messages, "seed": 3, **fields}
    body.setdefault("max_completion_tokens", 8)
    return client.call("POST", "/v1/chat/completions", body)


def prompt_text(engine: Engine, model: str, answer: Answer) -> str:
    """The prompt that was sampled from, of an answer with ``return_token_ids``."""
    assert answer.status == 200, answer.body
    tokens = answer.json["choices"][0]["prompt_token_ids"]
    return engine.models.find(model).tokenizer.decode(tokens)


def test_an_answer_is_the_completion_of_the_rendered_chat(cleo: Client, chat_engine: Engine) -> None:
    answer = chat(cleo, n=2, logprobs=True, top_logprobs=3, return_token_ids=True, temperature=0.9)
    assert answer.status == 200, answer.body
    expected = chat_engine.models.find("tiny").tokenizer.apply_chat_template(HELLO)
    same = {"model": "tiny", "prompt": expected, "max_tokens": 8, "seed": 3, "n": 2, "temperature": 0.9}
    completed = cleo.call("POST", "/v1/completions", {**same, "logprobs": 3, "return_token_ids": True}).json
    assert answer.json["usage"] == completed["usage"] | {
        "prompt_tokens_details": answer.json["usage"]["prompt_tokens_details"]
    }
    for choice, other in zip(answer.json["choices"], completed["choices"], strict=True):
        assert choice["message"] == {"role": "assistant", "content": other["text"]}
        assert choice["token_ids"] == other["token_ids"]
        assert choice["prompt_token_ids"] == expected
        assert choice["finish_reason"] == other["finish_reason"]
        entries = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == other["logprobs"]["token_logprobs"]
        assert [entry["token"] for entry in entries] == other["logprobs"]["tokens"]
        for entry, top in zip(entries, other["logprobs"]["top_logprobs"], strict=True):
            assert len(entry["top_logprobs"]) == 3
            assert entry["top_logprobs"][0]["logprob"] == max(top.values())
            assert bytes(entry["bytes"]).decode("utf-8", "replace") or entry["bytes"] == []


@pytest.mark.parametrize("model", ["tiny", "hermes", "thinking", "always-thinking", "llama3", "mistral"])
def test_a_stream_has_the_parts_of_the_response(cleo: Client, model: str) -> None:
    asked: dict[str, Any] = {
        "n": 2,
        "logprobs": True,
        "top_logprobs": 4,
        "return_token_ids": True,
        "max_completion_tokens": 24,
    }
    if model in {"hermes", "llama3", "mistral"}:
        asked["tools"] = [WEATHER]
    whole = chat(cleo, model, **asked).json
    streamed = chunks(chat(cleo, model, stream=True, stream_options={"include_usage": True}, **asked))
    assert streamed[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    parts = [choice for chunk in streamed for choice in chunk["choices"]]
    for choice in whole["choices"]:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        for name in ("content", "reasoning_content"):
            joined = "".join(part["delta"].get(name) or "" for part in mine)
            assert joined == (choice["message"].get(name) or "")
        assert [token for part in mine for token in part.get("token_ids", [])] == choice["token_ids"]
        prompts = [part["prompt_token_ids"] for part in mine if "prompt_token_ids" in part]
        assert prompts == [choice["prompt_token_ids"]]
        entries = [entry for part in mine for entry in (part["logprobs"] or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_every_role_and_content_parts_are_rendered(cleo: Client, chat_engine: Engine) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]
    answer = chat(cleo, "hermes", messages, tools=[WEATHER], return_token_ids=True)
    text = prompt_text(chat_engine, "hermes", answer)
    assert '"name": "weather", "description": "The weather of a city."' in text
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert "<|im_start|>user\nOne\ntwo<|im_end|>" in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert text.endswith("<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n")


def test_tools_that_may_not_be_called_are_not_rendered(cleo: Client, chat_engine: Engine) -> None:
    answer = chat(cleo, "hermes", tools=[WEATHER], tool_choice="none", return_token_ids=True)
    assert "weather" not in prompt_text(chat_engine, "hermes", answer)


def test_thinking_is_switched_by_effort_or_by_the_template_s_own_variable(
    cleo: Client, chat_engine: Engine
) -> None:
    for fields, closed in (
        ({}, False),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": False}, True),
        ({"reasoning_effort": "high"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
    ):
        answer = chat(cleo, "thinking", return_token_ids=True, **fields)
        assert prompt_text(chat_engine, "thinking", answer).endswith("</think>\n\n") == closed
    answer = chat(cleo, "always-thinking", reasoning_effort="low", return_token_ids=True)
    assert prompt_text(chat_engine, "always-thinking", answer).startswith("effort low\n")


def test_thoughts_are_separated_unless_they_are_wanted_in_the_text(cleo: Client) -> None:
    separated = chat(cleo, "always-thinking").json["choices"][0]["message"]
    assert separated["content"] == ""
    assert separated["reasoning_content"]
    together = chat(cleo, "always-thinking", separate_reasoning=False).json["choices"][0]["message"]
    assert together["content"].strip("\n") == separated["reasoning_content"]


def test_a_value_that_is_none_of_several_is_answered_with_those_that_work(cleo: Client) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "xml"}}, "text, json_object, json_schema"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "none, auto, required"),
        ({"messages": [{"role": "poet", "content": "a"}]}, "system, developer, user, assistant, tool"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "one of: text.",
        ),
    ]
    for fields, values in asked:
        message = error(chat(cleo, "hermes", **fields))["message"]
        assert all(value in message for value in values.split(", ")), message


def test_thoughts_that_the_prompt_starts_are_ended_for_an_effort_of_none(
    cleo: Client, chat_engine: Engine
) -> None:
    for effort in ("none", False):
        answer = chat(cleo, "always-thinking", HELLO, reasoning_effort=effort, return_token_ids=True)
        assert prompt_text(chat_engine, "always-thinking", answer).endswith("<think>\n</think>\n\n")
        assert "reasoning_content" not in answer.json["choices"][0]["message"]


async def test_large_replies_are_built_on_a_thread(cleo: Client, chat_engine: Engine) -> None:
    call = Call(chat_engine, LOCAL_USER, None, b"", {}, Request({"type": "http"}))
    threads = set()

    def make() -> dict[str, Any]:
        threads.add(threading.get_ident())
        return {"index": 0}

    for num_values, is_here in ((MAX_LOOP_VALUES, True), (MAX_LOOP_VALUES + 1, False)):
        threads.clear()
        reply = await choices_reply(call, [make, make], lambda made: {"choices": made}, num_values, {})
        assert reply.body == b'{"choices":[{"index":0},{"index":0}]}'
        assert (threads == {threading.get_ident()}) == is_here


def test_a_large_reply_is_complete(cleo: Client) -> None:
    asked: dict[str, Any] = {"n": 8, "max_completion_tokens": 60, "logprobs": True}
    large, small = chat(cleo, top_logprobs=20, **asked), chat(cleo, **asked)
    assert large.status == small.status == 200
    for mine, other in zip(large.json["choices"], small.json["choices"], strict=True):
        assert mine["message"] == other["message"]
        for entry, plain in zip(mine["logprobs"]["content"], other["logprobs"]["content"], strict=True):
            assert len(entry.pop("top_logprobs")) == 20
            assert entry == {name: value for name, value in plain.items() if name != "top_logprobs"}
    assert large.json["usage"]["completion_tokens"] == small.json["usage"]["completion_tokens"] > 390


def test_a_checkpoint_of_another_base_model_is_rejected_by_their_names(
    cleo: Client, chat_engine: Engine
) -> None:
    path = save(cleo, "sampler_weights", "s")
    answer = chat(cleo, f"hermes;{path}")
    assert (answer.status, error(answer)["param"]) == (400, "model")
    assert "trained on tiny, which is another model than hermes." in error(answer)["message"]


def test_an_answer_ends_where_the_template_ends_a_turn(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")  # its text ends with <|im_end|>
    weights = model / "model.safetensors"
    save_file({name: np.zeros_like(value) for name, value in load_file(weights).items()}, weights)
    settings = model / "tokenizer_config.json"
    template = (
        "{% if tools %}{{ 'Answer with <tool_call>' }}{% endif %}"
        "{% for m in messages %}{{ m.role + m.content + '<|endoftext|>' }}{% endfor %}"
    )
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    config = EngineConfig(home=tmp_path / "home", models={"base": str(model)})
    with started_engine(config) as engine:
        client = Client(build_app(engine), engine.api_key)
        strict = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]
        for fields in ({}, {"stop": []}, {"stop": "never"}, {"stop": ["never", "ever"]}, {"tools": strict}):
            asked: dict[str, Any] = {"temperature": 0, "return_token_ids": True, **fields}
            [choice] = chat(client, "base", **asked).json["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
            assert choice["token_ids"] == [0]
            deltas = [chunk["choices"][0] for chunk in chunks(chat(client, "base", stream=True, **asked))]
            assert "".join(each["delta"].get("content", "") for each in deltas) == ""
            assert deltas[-1]["finish_reason"] == "stop"
        for stops in ([], ["never"]):
            body = {
                "model": "base",
                "max_tokens": 9,
                "temperature": 0,
                "messages": HELLO,
                "stop_sequences": stops,
            }
            message = client.call("POST", "/v1/messages", body).json
            assert (message["content"], message["stop_reason"], message["stop_sequence"]) == (
                [],
                "end_turn",
                None,
            )
        body = {
            "model": "base",
            "prompt": "Hello",
            "temperature": 0,
            "max_tokens": 3,
            "return_token_ids": True,
        }
        assert client.call("POST", "/v1/completions", body).json["choices"][0]["token_ids"] == [0, 0, 0]


def test_an_answer_is_as_long_as_the_context_by_default(cleo: Client) -> None:
    answer = chat(cleo, max_completion_tokens=None, temperature=0, logit_bias=None, stop=None).json
    total, (choice,) = answer["usage"]["total_tokens"], answer["choices"]
    assert (total, choice["finish_reason"]) == (512, "length") or choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("model", "fields", "field"),
    [
        ("tiny", {"messages": []}, "messages"),
        ("tiny", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("tiny", {"messages": [{"role": "poet", "content": "a"}]}, "messages[0].role"),
        ("tiny", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("tiny", {"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "messages[0].mood"),
        ("tiny", {"messages": [{"role": "user", "content": "a", "name": "Ada"}]}, "messages[0].name"),
        (
            "tiny",
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]},
            "messages[0].tool_call_id",
        ),
        ("tiny", {"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}, "messages[0].role"),
        ("hermes", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        (
            "tiny",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ("base", {}, "messages"),
        ("tiny", {"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
        ("tiny", {"tools": [WEATHER]}, "tools"),
        ("tiny", {"tool_choice": "required"}, "tool_choice"),
        (
            "hermes",
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ("hermes", {"tools": [WEATHER, WEATHER]}, "tools"),
        (
            "hermes",
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools",
        ),
        ("hermes", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("hermes", {"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        (
            "hermes",
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}
                ]
            },
            "tools",
        ),
        (
            "hermes",
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"a": 1}}}
                ]
            },
            "tools",
        ),
        ("hermes", {"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ("tiny", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("tiny", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            "tiny",
            {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
        ),
        (
            "tiny",
            {"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
        ),
        ("tiny", {"functions": [{"name": "a"}]}, "functions"),
        ("tiny", {"function_call": "auto"}, "function_call"),
        ("tiny", {"modalities": ["text", "audio"]}, "modalities"),
        ("tiny", {"service_tier": "auto"}, "service_tier"),
        ("tiny", {"guided_json": {}}, "guided_json"),
        ("tiny", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("thinking", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("thinking", {"reasoning_effort": 0.5}, "reasoning_effort"),
        ("always-thinking", {"reasoning_effort": "bogus"}, "reasoning_effort"),
        ("always-thinking", {"reasoning_effort": True}, "reasoning_effort"),
        (
            "thinking",
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            "thinking",
            {"chat_template_kwargs": {"enable_thinking": True}, "response_format": {"type": "json_object"}},
            "chat_template_kwargs.enable_thinking",
        ),
        ("tiny", {"separate_reasoning": True}, "separate_reasoning"),
        (
            "tiny",
            {"chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        ("tiny", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ("tiny", {"top_logprobs": 2}, "top_logprobs"),
        ("tiny", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("tiny", {"logprobs": 2}, "logprobs"),
        ("tiny", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("tiny", {"max_completion_tokens": 4, "max_tokens": 5}, "max_tokens"),
        ("tiny", {"n": 0}, "n"),
        (
            "hermes",
            {"n": 1024, "max_completion_tokens": 2000, "logprobs": True, "top_logprobs": 20},
            "top_logprobs",
        ),
        ("tiny", {"temperature": 1e300}, "temperature"),
        ("tiny", {"temperature": "warm"}, "temperature"),
        ("tiny", {"stream_options": {}}, "stream_options"),
        ("tiny", {"best_of": 2}, "best_of"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_honoured_is_a_400_that_names_it(
    cleo: Client, model: str, fields: dict[str, Any], field: str
) -> None:
    answer = chat(cleo, model, **fields)
    assert answer.status == 400, answer.body
    found = error(answer)
    assert found["type"] == "invalid_request_error"
    assert found["param"] == field
    assert field.rpartition(".")[2] in found["message"]


def test_arguments_in_the_history_must_be_json(cleo: Client) -> None:
    for arguments in ("{", "[1]"):
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        answer = chat(cleo, "hermes", [*HELLO, {"role": "assistant", "tool_calls": [call]}], tools=[WEATHER])
        assert error(answer)["param"] == "messages[1].tool_calls[0].function.arguments"


def test_calls_in_the_history_are_in_their_order(cleo: Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    for index, status in ((0, 200), (1, 400)):
        history = [*HELLO, {"role": "assistant", "tool_calls": [{**call, "index": index}]}]
        answer = chat(cleo, "hermes", history, tools=[WEATHER])
        assert answer.status == status
    assert error(answer)["param"] == "messages[1].tool_calls[0].index"


def test_what_the_template_rejects_is_a_400_with_its_reason(cleo: Client, chat_engine: Engine) -> None:
    answer = chat(cleo, "strict", [{"role": "system", "content": "a"}])
    assert (answer.status, error(answer)["param"]) == (400, "messages")
    assert "no system message, please" in error(answer)["message"]
    named = chat(cleo, "strict", [{"role": "user", "content": "a", "name": "Ada"}], return_token_ids=True)
    assert prompt_text(chat_engine, "strict", named) == "Adaa"


def test_fields_without_effect_are_named_in_a_header(cleo: Client) -> None:
    answer = chat(cleo, user="me", metadata={}, store=True, parallel_tool_calls=False)
    assert answer.headers["x-tinkex-ignored-fields"] == "user, metadata, store, parallel_tool_calls"
    streamed = chat(cleo, user="me", stream=True)
    assert streamed.headers["x-tinkex-ignored-fields"] == "user"


def test_thoughts_of_the_history_are_rendered_or_named_in_a_header(cleo: Client, chat_engine: Engine) -> None:
    history = [*HELLO, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}, *HELLO]
    rendered = chat(cleo, "thinking", history, return_token_ids=True)
    assert "<think>\nhm\n</think>" in prompt_text(chat_engine, "thinking", rendered)
    assert "x-tinkex-ignored-fields" not in rendered.headers
    dropped = chat(cleo, "strict", history)
    assert dropped.headers["x-tinkex-ignored-fields"] == "messages.reasoning_content"
