"""Task files: every form is read, and what is not a task is an error that names the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import ConfigError
from tinkex.evaluation import ItemResult, TaskResult, read_task, summarize
from tinkex.evaluation.evaluate import score_answer
from tinkex.evaluation.lm_eval_tasks import rolling_windows


def write(folder: Path, *items: Any) -> Path:
    file = folder / "task.jsonl"
    file.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in items))
    return file


@pytest.mark.parametrize(
    ("item", "kind", "right", "wrong"),
    [
        ({"answer": "4"}, "exact", " 4\n", "44"),
        ({"answer": 4}, "exact", "4", "four"),
        ({"answer": ["4", "four"]}, "exact", "four", "five"),
        ({"pattern": "(?i)^the sea"}, "regex", "The sea.", "At sea."),
    ],
)
def test_answers_are_scored_as_their_kind_says(
    item: dict[str, Any], kind: str, right: str, wrong: str, tmp_path: Path
) -> None:
    task = read_task(write(tmp_path, {"prompt": "2+2=", **item}))
    assert (task.name, task.kind) == ("task", kind)
    assert [score_answer(task, task.items[0], answer) for answer in (right, wrong)] == [1.0, 0.0]


def test_choices_are_named_by_text_or_index(tmp_path: Path) -> None:
    both = ({"prompt": "a", "choices": ["b", "c"], "answer": answer} for answer in ("c", 1))
    task = read_task(write(tmp_path, *both))
    assert task.kind == "multiple_choice"
    assert not task.samples_answers
    assert [item.correct for item in task.items] == [1, 1]


def test_a_scorer_gets_the_whole_line(tmp_path: Path) -> None:
    scorer = tmp_path / "scorers.py"
    scorer.write_text(
        "def near(completion, example):\n    return 1 / (1 + abs(int(completion) - example['n']))\n"
    )
    item = {"messages": [{"role": "user", "content": "Guess."}], "n": 7}
    task = read_task(write(tmp_path, item), f"{scorer}:near")
    assert task.kind == "scorer"
    assert score_answer(task, task.items[0], "8") == 0.5


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((), "has no items"),
        (("{",), "task.jsonl:1: invalid JSON"),
        (({"answer": "4"},), "task.jsonl:1: it has no prompt"),
        (({"prompt": " ", "answer": "4"},), "neither a text nor a list of messages"),
        (({"prompt": [{"role": "user"}], "answer": "4"},), "neither a text nor a list of messages"),
        (({"prompt": "a", "messages": [], "answer": "4"},), "a prompt and messages"),
        (({"prompt": "a"},), "no answer, pattern or choices"),
        (({"prompt": "a", "answer": {}},), "answer is not a text"),
        (({"prompt": "a", "pattern": "("},), "not a valid regular expression"),
        (({"prompt": "a", "pattern": "b", "answer": "c"},), "an answer and a pattern"),
        (({"prompt": "a", "choices": ["b"], "answer": 0},), "at least two texts"),
        (({"prompt": "a", "choices": ["b", "b"], "answer": 0},), "the same text twice"),
        (({"prompt": "a", "choices": ["b", "c"], "answer": 2},), "neither one of the choices"),
        (({"prompt": "a", "choices": ["b", "c"], "answer": True},), "neither one of the choices"),
        (({"prompt": "a", "answer": "4"}, {"prompt": "a", "pattern": "4"}), "mixes kinds of items"),
        (tuple({"prompt": "a"} for _ in range(5)), "(5 such lines)"),
    ],
)
def test_what_is_not_a_task_is_rejected(items: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        read_task(write(tmp_path, *items))
    assert message in str(raised.value)


def test_models_are_compared_item_by_item() -> None:
    before = TaskResult("sums", "base", [ItemResult({"score": n / 10}) for n in range(10)])
    after = TaskResult("sums", "new", [ItemResult({"score": n / 10 + 0.25}) for n in range(10)])
    first, second = summarize([before, after])
    assert (first.change, first.change_interval) == (None, None)
    assert second.change == pytest.approx(0.25)
    assert second.change_interval is not None
    assert second.change_interval == pytest.approx((0.25, 0.25))  # every item changed alike
    assert second.interval is not None
    assert second.interval.high - second.interval.low > 0.2


@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 10])
def test_rolling_windows_predict_every_token_once_with_all_the_context_there_is(length: int) -> None:
    tokens = list(range(length))
    windows = rolling_windows(tokens, 4)
    assert [token for window, count in windows for token in window[-count:]] == tokens[1:]
    assert all(len(window) <= 4 and count < len(window) for window, count in windows)
    assert rolling_windows(tokens, None) == ([(tokens, length - 1)] if length > 1 else [])
