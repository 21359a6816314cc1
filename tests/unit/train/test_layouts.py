"""Data as people have it: files of every kind, and the usual columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import ConfigError
from tinkex.train import SftSettings, read_data
from tinkex.train.examples import (
    OtherRecipeError,
    describe,
    read_conversations,
    read_preferences,
    read_prompts,
)
from tinkex.train.rows import read_rows

ROWS = [{"prompt": "2 + 2?", "completion": "4"}, {"prompt": 'a "b",\nc', "completion": "ü"}]


def as_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", as_lines(ROWS)),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("lines.json", as_lines(ROWS)),
        ("a.json", json.dumps({"version": 1, "data": ROWS}, indent=2)),
        ("a.jsonl", json.dumps({"train": ROWS, "test": []})),
        ("a.csv", 'prompt,completion\n2 + 2?,4\n"a ""b"",\nc",ü\n'),
        ("a.csv", 'prompt;completion\n2 + 2?;4\n"a ""b"",\nc";ü\n'),
        ("a.csv", 'Prompt, Completion \n2 + 2?,4\n"a ""b"",\nc",ü\n'),
        ("a.tsv", 'prompt\tcompletion\n2 + 2?\t4\n"a ""b"",\nc"\tü\n'),
    ],
)
def test_every_kind_of_file_holds_the_same_rows(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    found = read_conversations(file)
    assert [{"prompt": one.prompt, "completion": one.answer} for one in found] == ROWS
    assert all(str(file) in one.where for one in found)


SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("read", "row", "layout", "prompt"),
    [
        (read_conversations, {"messages": CHAT}, "messages", CHAT[:1]),
        (read_conversations, {"messages": json.dumps(CHAT)}, "messages", CHAT[:1]),
        (read_conversations, {"messages": {"role": ["user", "assistant"], "content": ["Hi", "Hello"]}}, "messages", CHAT[:1]),
        (read_conversations, SHAREGPT, "ShareGPT conversations", CHAT[:1]),
        (read_conversations, {"conversations": CHAT}, "ShareGPT conversations", CHAT[:1]),
        (read_conversations, {"prompt": "Hi", "response": "Hello"}, "prompt/response", "Hi"),
        (read_conversations, {"instruction": "Add", "input": "2, 2", "output": "4"}, "instruction/input/output", "Add\n\n2, 2"),
        (read_conversations, {"instruction": "Hi", "input": "", "output": "4"}, "instruction/input/output", "Hi"),
        (read_conversations, {"question": "Hi", "answer": "Hello"}, "question/answer", "Hi"),
        (read_preferences, {"question": "Hi", "chosen": "a", "rejected": "b"}, "question/chosen/rejected", "Hi"),
        (read_preferences, {"chosen": CHAT, "rejected": [CHAT[0], {**CHAT[1], "content": "Go"}]}, "chosen/rejected", CHAT[:1]),
        (read_prompts, {"question": "Hi", "answer": "4"}, "question", "Hi"),
        (read_prompts, {"instruction": "Hi"}, "instruction/input", "Hi"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_usual_columns_are_recognised_and_named(
    read: Callable[[Path], list[Any]], row: dict[str, Any], layout: str, prompt: Any, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(as_lines([row]))
    (one,) = found = read(file)
    assert (describe(found), one.prompt) == (layout, prompt)


def test_one_object_over_several_lines_is_one_row(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"Question": "Hi", "Answer": "Hello"}, indent=2))
    (one,) = read_conversations(file)
    assert (one.prompt, one.answer, one.layout) == ("Hi", "Hello", "question/answer")
    file.write_text(json.dumps({"question": "Hi"}, indent=2))
    with pytest.raises(ConfigError, match=r"a\.json:1: the columns are not recognised: it has question\."):
        read_conversations(file)


def test_a_reward_finds_columns_under_the_names_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("Question;Answer\n2+2?;4\n")
    (one,) = read_prompts(file)
    assert (one.prompt, one.fields["Answer"]) == ("2+2?", "4")


def test_other_columns_are_mapped(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("title,body,extra\nHi,Hello,x\n")
    settings = SftSettings(
        data=file, output=tmp_path / "run", columns={"prompt": "title", "completion": "body"}
    )
    data = read_data(settings)
    assert [(one.prompt, one.answer) for one in data.examples] == [("Hi", "Hello")]
    assert data.description == f"1 example from {file} (prompt/completion)"


def test_a_row_of_a_csv_file_with_other_columns_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("prompt,completion\na,b\nc\n")
    with pytest.raises(ConfigError, match=r"a\.csv:3: the row does not have the 2 columns"):
        read_conversations(file)
    file.write_text('prompt,completion\n"a\n')
    with pytest.raises(ConfigError, match="invalid CSV"):
        read_conversations(file)


def test_tool_calls_and_results_are_kept_as_messages(tmp_path: Path) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    result = {"role": "tool", "content": "4", "tool_call_id": "1"}
    file, tools = tmp_path / "a.jsonl", [{"type": "function", "function": {"name": "f"}}]
    rows = [
        {"messages": [CHAT[0], call, result, CHAT[1]], "tools": tools},
        {"messages": [CHAT[0], call], "tools": json.dumps(tools)},
    ]
    file.write_text(as_lines(rows))
    answered, calls = read_conversations(file)
    assert [message["role"] for message in answered.prompt] == ["user", "assistant", "tool"]  # type: ignore[index]
    assert answered.answer == "Hello"
    assert isinstance(calls.answer, dict)
    assert calls.answer["tool_calls"] == call["tool_calls"]
    assert answered.tools == calls.tools == tools
    for wrong in (
        {"messages": [CHAT[0], {**call, "tool_calls": "f"}]},
        {"messages": CHAT, "tools": "["},
        {"messages": CHAT, "tools": "3"},
    ):
        file.write_text(as_lines([wrong]))
        with pytest.raises(ConfigError, match=r"a\.jsonl:1: 'tool"):
            read_conversations(file)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": [{"from": "alien", "value": "x"}]}, "'conversations'[0] needs 'from'"),
        ({"conversations": "no list"}, "'conversations'[0] needs 'from'"),
        ({"messages": "[1"}, "'messages' is not valid JSON"),
    ],
)
def test_a_chat_that_cannot_be_read_is_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(as_lines([row]))
    with pytest.raises(ConfigError) as raised:
        read_conversations(file)
    assert said in str(raised.value)


def test_data_for_another_recipe_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(as_lines([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2))
    with pytest.raises(OtherRecipeError) as raised:
        read_conversations(file)
    assert raised.value.recipe == "dpo"
    file.write_text(as_lines([{"prompt": "a"}]))
    with pytest.raises(OtherRecipeError) as raised:
        read_conversations(file)
    assert raised.value.recipe == "grpo"


def test_sources_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, said in (("empty", "holds no data"), ("none.parquet", "no file"), ("none.csv", "no file")):
        with pytest.raises(ConfigError, match=said):
            list(read_rows(tmp_path / source))
    for name, content, said in (
        ("a.csv", "prompt,completion\nWo?,Köln\n".encode("utf-16"), "save it as UTF-8"),
        ("notes.txt", b"Hello.\nThis is text.\n", "contains no JSON objects; pass a JSON lines, JSON, CSV"),
        ("3.json", b"3", "contains no JSON objects"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            list(read_rows(tmp_path / name))
