"""Rewards: a Python function of the user's, or a pattern that answers should match."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigError

__all__ = ["Reward", "load_reward", "pattern_reward"]

Reward = Callable[[str, str, Mapping[str, Any]], float]
"""Prompt, completion and the line of the data in; a number out."""
ARGUMENTS = ("prompt", "completion", "example")


def pattern_reward(pattern: str) -> Reward:
    """1 where the pattern is found in the completion, else 0.

    >>> pattern_reward(r"four|4")("2 + 2?", "It is 4.", {})
    1.0
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    return lambda _prompt, completion, _example: 1.0 if compiled.search(completion) else 0.0


def load_reward(place: str) -> Reward:
    """The function at ``file.py:function``; it takes any of ``prompt``, ``completion`` and ``example``, by name.

    ::

        # rewards.py
        def is_right(completion, example):
            return float(example["answer"] in completion)
    """
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        raise ConfigError(f"{place!r} names no function; write it as file.py:function")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}, where the reward {name} should be")
    spec = importlib.util.spec_from_file_location(f"tinkex_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file; a reward is given as file.py:function")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything, and it is told which file did
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v)) or "none"
        raise ConfigError(f"{path} has no function {name!r}; it has {there}")
    return _called_by_name(function, place)


def _called_by_name(function: Callable[..., Any], place: str) -> Reward:
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    unknown = [p.name for p in named if p.name not in ARGUMENTS and p.default is p.empty]
    if unknown:
        raise ConfigError(
            f"the reward {place} wants {unknown[0]!r}; it can be given {', '.join(ARGUMENTS)} (by these names)"
        )
    wanted = ARGUMENTS if takes_all else tuple(p.name for p in named if p.name in ARGUMENTS)
    if "completion" not in wanted:
        raise ConfigError(
            f"the reward {place} does not look at the completion; give it a parameter 'completion'"
        )

    def reward(prompt: str, completion: str, example: Mapping[str, Any]) -> float:
        given = {"prompt": prompt, "completion": completion, "example": example}
        try:
            value = float(function(**{name: given[name] for name in wanted}))
        except Exception as error:  # the user's code may raise anything, and it is told what it was given
            raise ConfigError(
                f"the reward {place} failed on {completion[:60]!r}: {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(value):
            raise ConfigError(f"the reward {place} gave {value} for {completion[:60]!r}; it must be finite")
        return value

    return reward
