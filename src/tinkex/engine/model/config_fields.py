"""Typed fields of a model's ``config.json``: what is there must make sense, or is a ``SetupError`` that names it.

A null counts as absent, as it does for the tools that write these files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.errors import SetupError

__all__ = ["flag", "integer", "mapping", "number", "texts"]

_LARGEST = 2**31 - 1


def integer(
    config: Mapping[str, Any],
    name: str,
    otherwise: int | None = None,
    *,
    least: int = 1,
    most: int = _LARGEST,
) -> int:
    """An integer between ``least`` and ``most``; without ``otherwise`` it must be there.

    Example:
        >>> integer({"num_hidden_layers": 30}, "num_hidden_layers")
        30
    """
    value = config.get(name)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(name, "a positive integer" if least == 1 else f"an integer of at least {least}", value)
    return value


def number(
    config: Mapping[str, Any], name: str, otherwise: float, *, above: float = 0.0, least: float | None = None
) -> float:
    """A finite number above ``above``, or of at least ``least`` where that is given.

    Example:
        >>> number({"rms_norm_eps": 1e-05}, "rms_norm_eps", 1e-6)
        1e-05
    """
    value = config.get(name)
    value = otherwise if value is None else value
    wanted = f"a number above {above:g}" if least is None else f"a number of at least {least:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(name, wanted, value)
    if value <= above if least is None else value < least:
        raise _wrong(name, wanted, value)
    return float(value)


def flag(config: Mapping[str, Any], name: str, *, otherwise: bool = False) -> bool:
    """True or false.

    Example:
        >>> flag({}, "tie_word_embeddings")
        False
    """
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return otherwise if value is None else value


def mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object, empty if it is absent.

    Example:
        >>> mapping({"rope_scaling": None}, "rope_scaling")
        {}
    """
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    return value or {}


def texts(config: Mapping[str, Any], name: str) -> Sequence[str]:
    """A list of texts, empty if it is absent.

    Example:
        >>> texts({"architectures": ["LlamaForCausalLM"]}, "architectures")
        ['LlamaForCausalLM']
    """
    value = config.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise _wrong(name, "a list of texts", value)
    return value or []


def _wrong(name: str, wanted: str, value: object) -> SetupError:
    return SetupError(f"this model's config.json needs {wanted} as {name!r}, and has {value!r}")
