"""Reads a model's ``config.json``, and its typed fields; a field that is not valid raises a ``SetupError`` that names it.

Null counts as absent, as in the tools that write these files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinkex.errors import SetupError

__all__ = ["flag", "integer", "mapping", "number", "read_json", "strings"]

_MAX_INTEGER = 2**31 - 1


def read_json(path: Path, *, optional: bool = False) -> Mapping[str, Any]:
    """The object in a JSON file of a model directory; empty if the file is optional and does not exist.

    Example:
        >>> read_json(Path("models/SmolLM2-135M-Instruct/config.json"))["model_type"]
        'llama'
    """
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SetupError(f"{path.parent} is not a model directory: it has no {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise SetupError(f"{path} cannot be read as JSON ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise SetupError(f"{path} must contain a JSON object; download the model again")
    return value


def integer(
    config: Mapping[str, Any],
    name: str,
    default: int | None = None,
    *,
    minimum: int = 1,
    maximum: int = _MAX_INTEGER,
) -> int:
    """An integer between ``minimum`` and ``maximum``; required if there is no ``default``.

    Example:
        >>> integer({"num_hidden_layers": 30}, "num_hidden_layers")
        30
    """
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise _invalid(
            name, "a positive integer" if minimum == 1 else f"an integer of at least {minimum}", value
        )
    return value


def number(
    config: Mapping[str, Any], name: str, default: float, *, above: float = 0.0, minimum: float | None = None
) -> float:
    """A finite number above ``above``, or of at least ``minimum`` if given.

    Example:
        >>> number({"rms_norm_eps": 1e-05}, "rms_norm_eps", 1e-6)
        1e-05
    """
    value = config.get(name)
    value = default if value is None else value
    wanted = f"a number above {above:g}" if minimum is None else f"a number of at least {minimum:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _invalid(name, wanted, value)
    if value <= above if minimum is None else value < minimum:
        raise _invalid(name, wanted, value)
    return float(value)


def flag(config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """True or false.

    Example:
        >>> flag({}, "tie_word_embeddings")
        False
    """
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise _invalid(name, "true or false", value)
    return default if value is None else value


def mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object, empty if it is absent.

    Example:
        >>> mapping({"rope_scaling": None}, "rope_scaling")
        {}
    """
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise _invalid(name, "an object", value)
    return value or {}


def strings(config: Mapping[str, Any], name: str) -> Sequence[str]:
    """A list of strings, empty if it is absent.

    Example:
        >>> strings({"architectures": ["LlamaForCausalLM"]}, "architectures")
        ['LlamaForCausalLM']
    """
    value = config.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise _invalid(name, "a list of strings", value)
    return value or []


def _invalid(name: str, wanted: str, value: object) -> SetupError:
    return SetupError(f"this model's config.json needs {wanted} as {name!r}, and has {value!r}")
