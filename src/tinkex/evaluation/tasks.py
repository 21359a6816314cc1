"""Task files: prompts with expected answers, validated before any model is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tinkex.errors import ConfigError
from tinkex.train.rewards import Reward, load_reward
from tinkex.train.rows import Row, read_rows

__all__ = ["Kind", "Prompt", "Task", "TaskItem", "read_task"]

Kind: TypeAlias = Literal["exact", "regex", "multiple_choice", "scorer"]
Prompt: TypeAlias = str | list[dict[str, Any]]

FORMS = (
    'an item is {"prompt": …} with "answer" (exact match), "pattern" (regular expression), or "choices" and "answer" '
    "(multiple choice); other fields are for a scorer of yours"
)
NUM_SHOWN_PROBLEMS = 3


@dataclass(frozen=True)
class TaskItem:
    """One question: its prompt, and what is expected."""

    where: str
    """The file and line it comes from."""
    prompt: Prompt
    fields: Mapping[str, Any]
    """The whole line."""
    answers: Sequence[str] = ()
    """Accepted answers of an exact match."""
    pattern: re.Pattern[str] | None = None
    choices: Sequence[str] = ()
    correct: int = 0
    """The index of the right choice."""


@dataclass(frozen=True)
class Task:
    """Questions of one kind, and how answers are scored."""

    name: str
    kind: Kind
    items: Sequence[TaskItem]
    scorer: Reward | None = None

    @property
    def samples_answers(self) -> bool:
        """Whether answers are sampled; those of multiple choice are ranked by their logprobs."""
        return self.kind != "multiple_choice"


def read_task(file: str | Path, scorer: str | None = None) -> Task:
    r"""Reads a task file; ``scorer`` is a function of yours, ``file.py:function``, that scores the answers.

    The function takes any of ``prompt``, ``completion`` and ``example`` (the line) by name and returns a number. Raises
    ``ConfigError`` that names the line for a file that is not a task.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "sums.jsonl")
    ...     _ = path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    ...     read_task(path).kind
    'exact'
    """
    path = Path(file)
    reward = None if scorer is None else load_reward(scorer)
    kinds: dict[Kind, str] = {}
    items: list[TaskItem] = []
    problems: list[str] = []
    for row in read_rows(path):
        try:
            kind, item = _item(row, has_scorer=reward is not None)
        except _Invalid as error:
            problems.append(f"{row.where}: {error}")
            continue
        kinds.setdefault(kind, row.where)
        items.append(item)
    if problems:
        more = f"\n({len(problems)} such lines)" if len(problems) > NUM_SHOWN_PROBLEMS else ""
        shown = "\n".join(problems[:NUM_SHOWN_PROBLEMS])
        raise ConfigError(f"{shown}{more}\n{FORMS}")
    if not items:
        raise ConfigError(f"{path} has no items; {FORMS}")
    if len(kinds) > 1:
        places = ", ".join(f"{kind} in {where}" for kind, where in kinds.items())
        raise ConfigError(
            f"{path} mixes kinds of items ({places}); write each kind to a file of its own, and evaluate both"
        )
    return Task(path.stem, next(iter(kinds)), items, reward)


class _Invalid(Exception):
    """A line that is not an item."""


def _item(row: Row, *, has_scorer: bool) -> tuple[Kind, TaskItem]:
    if row.problem is not None:
        raise _Invalid(row.problem)
    fields = row.fields
    prompt = _prompt(fields)
    if has_scorer:
        return "scorer", TaskItem(row.where, prompt, fields)
    if "choices" in fields:
        if "pattern" in fields:
            raise _Invalid("it has choices and a pattern; give one of them")
        choices, correct = _choices(fields)
        return "multiple_choice", TaskItem(row.where, prompt, fields, choices=choices, correct=correct)
    if "pattern" in fields:
        if "answer" in fields:
            raise _Invalid("it has an answer and a pattern; give one of them")
        return "regex", TaskItem(row.where, prompt, fields, pattern=_pattern(fields["pattern"]))
    return "exact", TaskItem(row.where, prompt, fields, answers=_answers(fields))


def _prompt(fields: Mapping[str, Any]) -> Prompt:
    given = [name for name in ("prompt", "messages") if name in fields]
    if len(given) != 1:
        raise _Invalid("it has a prompt and messages; give one of them" if given else "it has no prompt")
    value = fields[given[0]]
    if isinstance(value, str) and value.strip() and given == ["prompt"]:
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return value
    raise _Invalid(f"{given[0]} is neither a text nor a list of messages with role and content")


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _answers(fields: Mapping[str, Any]) -> list[str]:
    value = fields.get("answer")
    if value is None:
        raise _Invalid("it has no answer, pattern or choices, and no scorer is given (--scorer)")
    answers = value if isinstance(value, list) else [value]
    if not answers or not all(isinstance(answer, str | int | float) for answer in answers):
        raise _Invalid("answer is not a text, a number, or a list of them")
    return [str(answer).strip() for answer in answers]


def _pattern(value: Any) -> re.Pattern[str]:
    if not isinstance(value, str):
        raise _Invalid("pattern is not a text")
    try:
        return re.compile(value)
    except re.error as error:
        raise _Invalid(f"pattern {value!r} is not a valid regular expression: {error}") from error


def _choices(fields: Mapping[str, Any]) -> tuple[list[str], int]:
    choices, answer = fields["choices"], fields.get("answer")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(one, str) and one for one in choices)
    ):
        raise _Invalid("choices is not a list of at least two texts that are not empty")
    if len(set(choices)) < len(choices):
        raise _Invalid("choices has the same text twice")
    if isinstance(answer, str) and answer in choices:
        return choices, choices.index(answer)
    if type(answer) is int and 0 <= answer < len(choices):
        return choices, answer
    raise _Invalid(f"answer {answer!r} is neither one of the choices nor the index of one, from 0")
