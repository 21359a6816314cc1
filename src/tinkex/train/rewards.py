"""Rewards: Python functions of the user and regular expressions, added with their weights."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigError

__all__ = ["Reward", "RewardSum", "WeightedReward", "load_reward", "pattern_reward", "split_weight"]

Reward = Callable[[str, str, Mapping[str, Any]], float]
"""Takes the prompt, the completion and the line of the data; returns a number."""
ARGUMENTS = ("prompt", "completion", "example")


@dataclass(frozen=True)
class WeightedReward:
    """One of the rewards of a run."""

    name: str
    weight: float
    function: Reward


@dataclass(frozen=True)
class RewardSum:
    """The sum of several rewards, each times its weight.

    >>> short = WeightedReward("short", 0.5, lambda prompt, completion, example: float(len(completion) < 9))
    >>> right = WeightedReward("right", 1.0, pattern_reward("4"))
    >>> RewardSum((short, right)).score("2 + 2?", "4", {})
    {'reward': 1.5, 'reward_short': 1.0, 'reward_right': 1.0}
    """

    parts: tuple[WeightedReward, ...]

    @classmethod
    def load(cls, functions: Sequence[str], patterns: Sequence[str]) -> RewardSum:
        """Loads ``file.py:function=WEIGHT`` and compiles patterns; raises ``ConfigError`` for one that cannot be used."""
        parts: list[WeightedReward] = []
        for one in functions:
            place, weight = split_weight(one)
            parts.append(WeightedReward(place.rpartition(":")[2], weight, load_reward(place)))
        parts += [WeightedReward("regex", 1.0, pattern_reward(pattern)) for pattern in patterns]
        if not any(part.weight for part in parts):
            raise ConfigError(
                "every reward has the weight 0, so there is nothing to learn; give one a weight"
            )
        names = [part.name for part in parts]
        numbered = [
            part if names.index(part.name) == place else WeightedReward(f"{part.name}_{place + 1}", part.weight, part.function)
            for place, part in enumerate(parts)
        ]  # fmt: skip
        return cls(tuple(numbered))

    def score(self, prompt: str, completion: str, example: Mapping[str, Any]) -> dict[str, float]:
        """Returns the weighted sum as ``reward`` and, if there are several, each as ``reward_<name>``, without its weight."""
        values = [part.function(prompt, completion, example) for part in self.parts]
        total = sum(part.weight * value for part, value in zip(self.parts, values, strict=True))
        if len(self.parts) == 1:
            return {"reward": total}
        named = {f"reward_{part.name}": value for part, value in zip(self.parts, values, strict=True)}
        return {"reward": total, **named}


def split_weight(place: str) -> tuple[str, float]:
    """Splits ``file.py:function=WEIGHT``; the weight is 1 if there is none.

    >>> split_weight("mine.py:short=0.5"), split_weight("a=b.py:right")
    (('mine.py:short', 0.5), ('a=b.py:right', 1.0))
    """
    function, sign, weight = place.rpartition("=")
    if not sign or ":" in weight:
        return place, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"the weight of the reward {place!r} is not a number; write file.py:function=0.5")
    return function, value


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
        raise ConfigError(
            f"there is no file {path} for the reward {name}; write the path of a Python file, a colon and the function"
        )
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
            returned = function(**{name: given[name] for name in wanted})
            if returned is None:
                raise ConfigError(
                    f"the reward {place} returned None for {completion[:60]!r}; it must return a number on every path"
                )
            value = float(returned)
        except ConfigError:
            raise
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
