"""``/v1/messages``: content blocks, tools, stop sequences and events of the Anthropic protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.engine.api.asgi import Answer, Client
from tests.unit.engine.api.test_openai_chat import HELLO, chat, chat_engine, cleo
from tinkex.engine.engine import Engine

pytestmark = pytest.mark.slow

__all__ = ["chat_engine", "cleo"]  # fixtures

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}


def ask(
    client: Client, model: str = "tiny", messages: Any = None, path: str = "/v1/messages", **fields: Any
) -> Answer:
    body = {"model": model, "max_tokens": 8, "temperature": 0, "messages": messages or HELLO, **fields}
    return client.call("POST", path, {name: value for name, value in body.items() if value is not ...})


def error(answer: Answer) -> dict[str, Any]:
    assert answer.json["type"] == "error"
    found: dict[str, Any] = answer.json["error"]
    return found


def events(answer: Answer) -> list[dict[str, Any]]:
    found = []
    for block in answer.body.decode().split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            if event["type"] != "ping":
                found.append(event)
    return found


def test_a_message_is_the_answer_of_the_openai_route(cleo: Client) -> None:
    answer = ask(cleo).json
    other = chat(cleo, temperature=0).json
    assert answer["content"] == [{"type": "text", "text": other["choices"][0]["message"]["content"]}]
    assert answer["usage"] == {
        "input_tokens": other["usage"]["prompt_tokens"],
        "output_tokens": other["usage"]["completion_tokens"],
    }
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert answer["id"].startswith("msg_")
    counted = cleo.call("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": HELLO}).json
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


@pytest.mark.parametrize("model", ["tiny", "always-thinking", "hermes"])
def test_events_build_the_message_of_the_response(cleo: Client, model: str) -> None:
    fields = {"tools": [WEATHER]} if model == "hermes" else {}
    whole = ask(cleo, model, max_tokens=24, **fields).json
    first, *rest = events(ask(cleo, model, max_tokens=24, stream=True, **fields))
    assert first["type"] == "message_start"
    assert first["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    blocks: list[dict[str, Any]] = []
    for event in rest[:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = {k: v for k, v in event["delta"].items() if k != "type"}
            blocks[event["index"]] |= {k: blocks[event["index"]][k] + v for k, v in delta.items()}
    assert blocks == whole["content"]
    assert rest[-2]["delta"] == {k: whole[k] for k in ("stop_reason", "stop_sequence")}
    assert rest[-2]["usage"] == whole["usage"]
    assert rest[-1] == {"type": "message_stop"}


def test_blocks_become_the_messages_of_the_template(cleo: Client, chat_engine: Engine) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]},
        {
            "role": "user",
            "content": [RESULT, {**RESULT, "is_error": True, "content": [{"type": "text", "text": "x"}]}],
        },
        {"role": "assistant", "content": "It is"},
    ]
    request = {"model": "hermes", "messages": messages, "system": [{"type": "text", "text": "Be brief."}]}
    counted = cleo.call("POST", "/v1/messages/count_tokens", request).json["input_tokens"]
    call = {
        "id": "toolu_1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Oslo"}},
    }
    tokenizer = chat_engine.models.find("hermes").tokenizer
    expected = tokenizer.render_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi\nthere"},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "sunny", "tool_call_id": "toolu_1"},
            {"role": "tool", "content": "Error: x", "tool_call_id": "toolu_1"},
        ]
    )
    assert counted == len(tokenizer.encode(expected + "It is", add_special_tokens=False))


def test_a_stop_sequence_is_named_and_not_part_of_the_text(cleo: Client) -> None:
    text = ask(cleo, max_tokens=20).json["content"][0]["text"]
    stop = next(text[n : n + 2] for n in range(3, len(text)) if text[n : n + 2].isascii())
    answer = ask(cleo, max_tokens=20, stop_sequences=["never", stop]).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text[: text.index(stop)]
    streamed = events(ask(cleo, max_tokens=20, stop_sequences=["never", stop], stream=True))
    assert streamed[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_thinking_is_switched_off_and_on(cleo: Client) -> None:
    def count(**fields: Any) -> int:
        request = {"model": "thinking", "messages": HELLO, **fields}
        tokens: int = cleo.call("POST", "/v1/messages/count_tokens", request).json["input_tokens"]
        return tokens

    assert count(thinking={"type": "disabled"}) > count()
    assert count(thinking={"type": "enabled", "budget_tokens": 1024}) == count()
    assert count(output_config={"effort": "high"}) == count()
    thoughts = ask(cleo, "always-thinking").json["content"]
    assert thoughts[0]["type"] == "thinking"
    ended = ask(cleo, "always-thinking", thinking={"type": "disabled"}).json["content"]
    assert {block["type"] for block in ended} <= {"text"}
    assert ask(cleo, "hermes", thinking={"type": "disabled"}).status == 200


@pytest.mark.parametrize(
    ("model", "fields", "field"),
    [
        ("tiny", {"max_tokens": ...}, "max_tokens"),
        ("tiny", {"max_tokens": 0}, "max_tokens"),
        ("tiny", {"max_tokens": "8"}, "max_tokens"),
        ("tiny", {"messages": ...}, "messages"),
        ("tiny", {"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        (
            "tiny",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        ("tiny", {"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].type"),
        ("hermes", {"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
        ("hermes", {"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages[1].content"),
        ("tiny", {"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
        ("base", {}, "messages"),
        ("tiny", {"tools": [WEATHER]}, "tools"),
        ("hermes", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ("hermes", {"tools": [{"name": "a", "input_schema": {"not": {}}, "strict": True}]}, "tools"),
        ("hermes", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("hermes", {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ("hermes", {"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ("tiny", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        (
            "thinking",
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            "output_config.effort",
        ),
        ("tiny", {"output_config": {"effort": "low"}}, "output_config.effort"),
        ("thinking", {"output_config": {"effort": "low"}}, "output_config.effort"),
        ("tiny", {"service_tier": "auto"}, "service_tier"),
        ("tiny", {"mcp_servers": []}, "mcp_servers"),
        ("tiny", {"seed": 3}, "seed"),
        ("tiny", {"temperature": -1}, "temperature"),
        ("tiny", {"top_p": 0}, "top_p"),
        ("tiny", {"top_k": 0}, "top_k"),
        ("tiny", {"stop_sequences": [""]}, "stop_sequences"),
        ("tiny", {"stop_sequences": "a"}, "stop_sequences"),
        ("tiny", {"stop_sequences": [f"stop {n}" for n in range(5000)]}, "stop_sequences"),
        ("hermes", {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_honoured_is_a_400_that_names_it(
    cleo: Client, model: str, fields: dict[str, Any], field: str
) -> None:
    answer = ask(cleo, model, **fields)
    assert answer.status == 400, answer.body
    found = error(answer)
    assert found["type"] == "invalid_request_error"
    assert field in found["message"]


def test_fields_without_effect_are_named_in_a_header(cleo: Client) -> None:
    cached = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    answer = ask(cleo, messages=[{"role": "user", "content": [cached]}], metadata={"user_id": "me"})
    assert answer.status == 200, answer.body
    assert answer.headers["x-tinkex-ignored-fields"] == "metadata, cache_control"
    thinking = ask(cleo, "thinking", thinking={"type": "enabled", "budget_tokens": 1024})
    assert thinking.headers["x-tinkex-ignored-fields"] == "thinking.budget_tokens"
    thoughts = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    use = {**USE, "caller": {"type": "direct"}}
    history = [
        *HELLO,
        {"role": "assistant", "content": [thoughts, use]},
        {"role": "user", "content": [RESULT]},
    ]
    for path, more in (
        ("/v1/messages", {}),
        ("/v1/messages/count_tokens", {"max_tokens": ..., "temperature": ...}),
    ):
        answer = ask(cleo, "hermes", history, path, **more)
        named = "messages.content.signature, messages.content.caller"
        assert answer.headers["x-tinkex-ignored-fields"] == named
    text = {"type": "text", "text": "a"}
    dropped = ask(
        cleo,
        "strict",
        [*HELLO, {"role": "assistant", "content": [{**thoughts, "signature": ""}, text]}, *HELLO],
    )
    assert dropped.headers["x-tinkex-ignored-fields"] == "messages.content.thinking"


@pytest.mark.parametrize("base", ["/v1", "/anthropic/api/v1"])
def test_errors_have_the_form_of_the_protocol_at_both_base_urls(cleo: Client, base: str) -> None:
    path = f"{base}/messages"
    assert ask(cleo, path=f"{path}?beta=true").status == 200
    assert error(ask(cleo, model="claude", path=path))["type"] == "not_found_error"
    anonymous = Client(cleo.app)
    refused = ask(anonymous, path=path)
    assert (refused.status, error(refused)["type"]) == (401, "authentication_error")
    assert error(ask(cleo, path=f"{path}?page=2"))["type"] == "invalid_request_error"
    assert error(cleo.call("POST", path, b"{"))["type"] == "invalid_request_error"
    assert error(cleo.call("GET", path))["message"]
    if base == "/anthropic/api/v1":
        assert error(cleo.call("GET", f"{base}/models"))["type"] == "not_found_error"
