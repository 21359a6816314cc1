"""Models that were trained to call a tool do so of their own choice, in each format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.engine.api.asgi import Client
from tests.unit.engine.api.test_anthropic import WEATHER as ANTHROPIC_WEATHER
from tests.unit.engine.api.test_anthropic import ask, events
from tests.unit.engine.api.test_openai_chat import WEATHER, chat, chat_engine, chunks, cleo
from tinkex.engine.engine import Engine

__all__ = ["chat_engine", "cleo"]  # fixtures

pytestmark = pytest.mark.slow

ANSWERS = {
    "hermes": 'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
}
STEPS = 60


def teach(client: Client, engine: Engine, model: str, prompt: list[int], answer: str) -> str:
    """Trains a model to answer one prompt; returns the path of its weights."""
    tokenizer = engine.models.find(model).tokenizer
    target = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_ids[0]]
    tokens = [*prompt, *target]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(target)
    shape = [len(weights)]
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": shape},
            "weights": {"data": weights, "dtype": "float32", "shape": shape},
        },
    }
    created = {
        "session_id": client.session(),
        "model_seq_id": 0,
        "base_model": model,
        "lora_config": {"rank": 32, "seed": 1},
    }
    run = client.result(client.post("create_model", created)).json["model_id"]
    submitted = []
    for step in range(STEPS):
        given = {"data": [datum], "loss_fn": "cross_entropy"}
        submitted.append(
            client.post(
                "forward_backward", {"model_id": run, "seq_id": 2 * step + 1, "forward_backward_input": given}
            )
        )
        adam = {"model_id": run, "seq_id": 2 * step + 2, "adam_params": {"learning_rate": 1e-2}}
        submitted.append(client.post("optim_step", adam))
    client.result(submitted[-1])
    save = {"model_id": run, "seq_id": 2 * STEPS + 1, "path": "taught"}
    path: str = client.result(client.post("save_weights_for_sampler", save)).json["path"]
    return path


@pytest.mark.parametrize("model", ANSWERS)
def test_a_model_that_chooses_to_call_a_tool(cleo: Client, chat_engine: Engine, model: str) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "temperature": 0, "max_completion_tokens": 100}
    prompt = chat(cleo, model, return_token_ids=True, **asked).json["choices"][0]["prompt_token_ids"]
    path = teach(cleo, chat_engine, model, prompt, ANSWERS[model])
    (choice,) = chat(cleo, path, **asked).json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "weather",
        {"city": "Oslo"},
    )
    assert choice["message"]["content"] == ("Sure." if model == "hermes" else None)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(chat(cleo, path, stream=True, **asked))]
    (streamed,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert streamed["function"] == call["function"]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == (choice["message"]["content"] or "")
    without = chat(cleo, path, **{**asked, "tool_choice": "none"}).json["choices"][0]["message"]
    assert "tool_calls" not in without
    blocks = ask(cleo, path, tools=[ANTHROPIC_WEATHER], max_tokens=100).json
    assert blocks["stop_reason"] == "tool_use"
    assert blocks["content"][-1]["input"] == {"city": "Oslo"}
    kinds = [
        event["type"]
        for event in events(ask(cleo, path, tools=[ANTHROPIC_WEATHER], max_tokens=100, stream=True))
    ]
    assert kinds[-4:] == ["content_block_delta", "content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("model", ANSWERS)
def test_a_call_of_a_strict_tool_is_valid_although_the_model_learned_another(
    cleo: Client, chat_engine: Engine, model: str
) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": schema}
    asked: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "temperature": 0,
        "max_completion_tokens": 100,
    }
    prompt = chat(cleo, model, return_token_ids=True, **asked).json["choices"][0]["prompt_token_ids"]
    path = teach(cleo, chat_engine, model, prompt, ANSWERS[model])
    strict = {**asked, "tools": [{"type": "function", "function": {**function, "strict": True}}]}
    cities = [
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["city"]
        for choice in (chat(cleo, path, **fields).json["choices"][0] for fields in (asked, strict))
    ]
    assert cities == ["Oslo", "Rome"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(chat(cleo, path, stream=True, **strict))]
    (streamed,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert json.loads(streamed["function"]["arguments"]) == {"city": "Rome"}
    tool = {"name": "weather", "input_schema": schema, "strict": True}
    blocks = ask(cleo, path, tools=[tool], max_tokens=100, temperature=0).json["content"]
    assert blocks[-1]["input"] == {"city": "Rome"}


@pytest.mark.parametrize("model", ANSWERS)
def test_strict_tools_leave_answers_in_text_free(cleo: Client, model: str) -> None:
    strict = {"type": "function", "function": {"name": "weather", "strict": True}}
    answers = [
        chat(cleo, model, tools=[strict], seed=seed, max_completion_tokens=30).json["choices"][0]
        for seed in range(4)
    ]
    assert len({answer["message"]["content"] for answer in answers}) > 1
