"""Rewards: a user-defined Python function, or a regular expression."""

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
"""Takes the prompt, the completion and the line of the data; returns a number."""
ARGUMENTS = ("prompt", "completion", "example")


def pattern_reward(pattern: str) -> Reward:
    """Returns a reward that is 1 if the completion contains a match of the pattern, else 0.

    >>> pattern_reward(r"four|4")("2 + 2?", "It is 4.", {})
    1.0
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"the pattern {pattern!r} is not a valid regular expression: {error}") from error
    return lambda _prompt, completion, _example: 1.0 if compiled.search(completion) else 0.0


def load_reward(place: str) -> Reward:
    """Loads ``file.py:function``; the function takes any of ``prompt``, ``completion`` and ``example``, by name.

    ::

        # rewards.py
        def is_right(completion, example):
            return float(example["answer"] in completion)
    """
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        raise ConfigError(f"{place!r} is not a function; write it as file.py:function")
    if not path.is_file():
        raise ConfigError(f"there is no file {path} for the reward {name}")
    spec = importlib.util.spec_from_file_location(f"tinkex_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; write the reward as file.py:function")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code may raise anything
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v)) or "none"
        raise ConfigError(f"{path} has no function {name!r}; it has {there}")
    return _call_by_name(function, place)


def _call_by_name(function: Callable[..., Any], place: str) -> Reward:
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    unknown = [p.name for p in named if p.name not in ARGUMENTS and p.default is p.empty]
    if unknown:
        raise ConfigError(
            f"the reward {place} has an unknown parameter {unknown[0]!r}; available by name: {', '.join(ARGUMENTS)}"
        )
    wanted = ARGUMENTS if takes_all else tuple(p.name for p in named if p.name in ARGUMENTS)
    if "completion" not in wanted:
        raise ConfigError(f"the reward {place} does not use the completion; add a parameter 'completion'")

    def reward(prompt: str, completion: str, example: Mapping[str, Any]) -> float:
        given = {"prompt": prompt, "completion": completion, "example": example}
        try:
            value = float(function(**{name: given[name] for name in wanted}))
        except Exception as error:  # user code may raise anything
            raise ConfigError(
                f"the reward {place} failed on {completion[:60]!r}: {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(value):
            raise ConfigError(
                f"the reward {place} returned {value} for {completion[:60]!r}; it must be finite"
            )
        return value

    return reward
