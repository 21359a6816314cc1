from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import ConfigError
from tinkex.train.examples import read_conversations, read_preferences, read_prompts, split

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}


def lines(path: Path, *values: Any) -> Path:
    path.write_text("\n".join(v if isinstance(v, str) else json.dumps(v) for v in values) + "\n")
    return path


def test_chats_and_pairs_are_read_with_where_they_stand(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl",
        {"messages": [USER, REPLY]},
        "",
        {"prompt": "2+2", "completion": "4"},
        {"prompt": [USER], "completion": [REPLY]},
    )
    chat, pair, listed = read_conversations(file)
    assert (chat.prompt, chat.answer) == ([USER], "Hello")
    assert (pair.prompt, pair.answer, pair.where) == ("2+2", "4", f"{file}:3")
    assert listed.answer == "Hello"


def test_a_byte_order_mark_is_not_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "Hi", "completion": "\\ud83d\\ude00"}\n')
    assert [(one.prompt, one.answer) for one in read_conversations(file)] == [("Hi", "\N{GRINNING FACE}")]


def test_preferences_may_share_their_prompt(tmp_path: Path) -> None:
    worse = {"role": "assistant", "content": "Go away"}
    file = lines(
        tmp_path / "a.jsonl",
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"},
        {"chosen": [USER, REPLY], "rejected": [USER, worse]},
    )
    first, second = read_preferences(file)
    assert (first.chosen, first.rejected) == (second.chosen, second.rejected) == ("Hello", "Go away")
    assert second.prompt == [USER]


def test_prompts_keep_the_whole_line_for_the_reward(tmp_path: Path) -> None:
    (one,) = read_prompts(lines(tmp_path / "a.jsonl", {"prompt": "2+2", "answer": 4}))
    assert (one.prompt, one.fields["answer"]) == ("2+2", 4)


@pytest.mark.parametrize(
    ("read", "line", "said"),
    [
        (read_conversations, "{", "invalid JSON"),
        (read_conversations, [1], "not a JSON object"),
        (read_conversations, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "too deep"),
        (read_conversations, '{"prompt": "a \\ud83d b", "completion": "c"}', "lone surrogate"),
        (
            read_conversations,
            {"text": "x"},
            "it has text. Expected: messages; ShareGPT conversations; prompt/completion",
        ),
        (read_conversations, {"messages": [USER]}, "must be 'assistant'"),
        (read_conversations, {"messages": [REPLY]}, "only an answer"),
        (read_conversations, {"messages": []}, "list of messages"),
        (
            read_conversations,
            {"messages": [{"role": "user"}, REPLY]},
            "content of a message must be a string",
        ),
        (read_conversations, {"messages": [{"content": "x"}, REPLY]}, "needs a 'role'"),
        (read_conversations, {"prompt": "", "completion": "x"}, "'prompt' is empty"),
        (read_conversations, {"prompt": "x", "completion": ""}, "'completion' is empty"),
        (read_conversations, {"prompt": "x", "completion": [USER]}, "must be 'assistant'"),
        (
            read_preferences,
            {"prompt": "x", "chosen": "a"},
            "it has chosen, prompt. Expected: prompt/chosen/rejected",
        ),
        (
            read_conversations,
            {"question": 2, "answer": "4"},
            "'prompt' must be a string or a list of messages, got 2 (the row has question/answer)",
        ),
        (
            read_preferences,
            {"chosen": "a", "rejected": "b"},
            "no 'prompt'; add that column, name yours with --columns prompt=",
        ),
        (read_preferences, {"prompt": "x", "chosen": "a", "rejected": "a"}, "are equal"),
        (read_preferences, {"chosen": [USER, REPLY], "rejected": [REPLY, REPLY]}, "same messages"),
        (read_prompts, {"text": "x"}, "it has text. Expected: prompt; messages; question"),
        (read_prompts, {"messages": [USER, REPLY]}, "must not have the role 'assistant'"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(
    read: Callable[[Path], object], line: Any, said: str, tmp_path: Path
) -> None:
    good = {"messages": [USER, REPLY], "prompt": "x", "chosen": "a", "rejected": "b"}
    if read is read_prompts:
        good = {"prompt": "x"}
    file = lines(tmp_path / "bad.jsonl", good, line)
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: ") as raised:
        read(file)
    assert said in str(raised.value)


def test_many_bad_lines_are_counted_and_the_first_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="9 invalid lines") as raised:
        read_prompts(lines(tmp_path / "a.jsonl", *[{name: 1} for name in "abcdefghi"]))
    assert str(raised.value).count("the columns are not recognised") == 5
    assert str(raised.value).endswith("\n… and 4 more")


def test_a_problem_of_many_lines_is_shown_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="21 invalid lines") as raised:
        read_prompts(lines(tmp_path / "a.jsonl", *[{"x": 1}] * 20, {"prompt": 3}))
    problems = str(raised.value).splitlines()[1:]
    assert len(problems) == 2
    assert ":1 and 19 more lines: the columns are not recognised" in problems[0]
    assert ":21: " in problems[1]


def test_missing_empty_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(ConfigError, match="contains no examples"):
        read_prompts(lines(tmp_path / "empty", ""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts(tmp_path / "binary")


def test_the_split_is_repeatable_and_loses_nothing() -> None:
    examples = list(range(30))
    learn, check = split(examples, 0.2, seed=1)
    assert (learn, check) == split(examples, 0.2, seed=1)
    assert split(examples, 0.2, seed=2)[1] != check
    assert sorted(learn + check) == examples
    assert len(check) == 6
    assert split(list(range(9)), 0.01, seed=0)[1] == []
    assert len(split(list(range(10)), 0.01, seed=0)[1]) == 1
