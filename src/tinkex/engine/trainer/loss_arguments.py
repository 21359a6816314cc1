"""The arguments of an uploaded graph's nodes: read from their written form, and filled in when the graph runs.

On the wire, JSON scalars, texts and lists stand for themselves; everything else is an object with one key, such as
``{"ref": "exp"}`` for the result of another node or ``{"slice": [null, -1, null]}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinkex.engine.trainer.loss_operations import DTYPES, WORDS

__all__ = ["MOST_DIGITS", "ArgumentReader", "Ref", "fill", "references"]

MOST_DIGITS = 2**63  # no whole number is as large
_DEEPEST = 8
_LONGEST_LIST = 1024
_LONGEST_TEXT = 200
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
}


@dataclass(frozen=True)
class Ref:
    """The result of an earlier node."""

    name: str


class ArgumentReader:
    """Reads arguments; ``known`` are the nodes that can be referred to, ``most_values`` bounds all of them together.

    Whatever is not allowed is a ``ValueError`` that says what it is.

    Example:
        >>> ArgumentReader({"exp"}, most_values=100).read({"tuple": [{"ref": "exp"}, 2]})
        (Ref(name='exp'), 2)
    """

    def __init__(self, known: set[str], most_values: int) -> None:
        self._known = known
        self._left = most_values

    def read(self, written: Any, *, texts: bool = False, depth: int = 0) -> Any:
        """One argument; ``texts`` allows any short text, otherwise only the words operations know."""
        self._left -= 1
        if self._left < 0:
            raise ValueError("with it, the graph has too many arguments")
        if depth > _DEEPEST:
            raise ValueError(f"its arguments are nested more than {_DEEPEST} deep")
        if written is None or isinstance(written, bool):
            return written
        if isinstance(written, int | float):
            return _number(written)
        if isinstance(written, str):
            return _text(written, any_text=texts)
        if isinstance(written, list | tuple):
            return self._several(written, depth)
        if isinstance(written, Mapping) and len(written) == 1:
            [(kind, content)] = written.items()
            return self._object(kind, content, depth)
        raise ValueError(f"an argument is {_shown(written)}, which is no value of a graph")

    def _several(self, written: Any, depth: int) -> list[Any]:
        if not isinstance(written, list | tuple):
            raise ValueError(f"{_shown(written)} stands where a list belongs")
        if len(written) > _LONGEST_LIST:
            raise ValueError(f"a list has {len(written)} entries; at most {_LONGEST_LIST} are allowed")
        return [self.read(entry, depth=depth + 1) for entry in written]

    def _object(self, kind: Any, content: Any, depth: int) -> Any:
        readers: dict[str, Callable[[], Any]] = {
            "ref": lambda: self._ref(content),
            "tuple": lambda: tuple(self._several(content, depth)),
            "dict": lambda: self._dict(content, depth),
            "slice": lambda: self._slice(content, depth),
            "ellipsis": lambda: Ellipsis,
            "float": lambda: _among("float", content, _FLOATS),
            "dtype": lambda: _among("dtype", content, DTYPES),
            "device": lambda: _among("device", content, {"cpu": torch.device("cpu")}),
            "layout": lambda: _among("layout", content, {"strided": torch.strided}),
            "memory_format": lambda: _among("memory_format", content, _MEMORY_FORMATS),
        }
        if not isinstance(kind, str) or kind not in readers:
            raise ValueError(
                f"an argument is an object with the key {_shown(kind)}; known are {', '.join(readers)}"
            )
        return readers[kind]()

    def _ref(self, name: Any) -> Ref:
        if not isinstance(name, str) or name not in self._known:
            raise ValueError(f"it refers to {_shown(name)}, which is no node before it")
        return Ref(name)

    def _dict(self, content: Any, depth: int) -> dict[str, Any]:
        if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
            raise ValueError("a dict has texts as keys")
        if len(content) > _LONGEST_LIST:
            raise ValueError(f"a dict has {len(content)} entries; at most {_LONGEST_LIST} are allowed")
        return {key: self.read(entry, depth=depth + 1) for key, entry in content.items()}

    def _slice(self, content: Any, depth: int) -> slice:
        ends = self._several(content, depth)
        if len(ends) != 3:
            raise ValueError("a slice is written [start, stop, step]")
        if not all(end is None or isinstance(end, Ref | int) for end in ends):
            raise ValueError("a slice has whole numbers, nodes or nothing as its ends")
        return slice(*ends)


def fill(argument: Any, values: Mapping[str, Any]) -> Any:
    """An argument with the values of the nodes it refers to.

    >>> fill((Ref("exp"), slice(None, Ref("n"))), {"exp": 2.5, "n": 3})
    (2.5, slice(None, 3, None))
    """
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return tuple(fill(entry, values) for entry in argument)
    if isinstance(argument, list):
        return [fill(entry, values) for entry in argument]
    if isinstance(argument, dict):
        return {key: fill(entry, values) for key, entry in argument.items()}
    if isinstance(argument, slice):
        return slice(*(fill(end, values) for end in (argument.start, argument.stop, argument.step)))
    return argument


def references(arguments: Any) -> set[str]:
    """The names of all nodes that some arguments refer to.

    >>> sorted(references([Ref("a"), {"k": (Ref("b"), 1)}]))
    ['a', 'b']
    """
    if isinstance(arguments, Ref):
        return {arguments.name}
    if isinstance(arguments, dict):
        return references(list(arguments.values()))
    if isinstance(arguments, slice):
        return references([arguments.start, arguments.stop, arguments.step])
    if isinstance(arguments, Sequence) and not isinstance(arguments, str):
        return set[str]().union(*(references(entry) for entry in arguments))
    return set()


def _number(written: float) -> float:
    if isinstance(written, int) and not -MOST_DIGITS < written < MOST_DIGITS:
        raise ValueError("a whole number does not fit 64 bits")
    return written


def _text(written: str, *, any_text: bool) -> str:
    if len(written) > _LONGEST_TEXT:
        raise ValueError(f"a text has {len(written)} characters; at most {_LONGEST_TEXT} are allowed")
    if not any_text and written not in WORDS:
        raise ValueError(f"the text {written!r} is no argument of an allowed operation")
    return written


def _among(kind: str, content: Any, allowed: Mapping[str, Any]) -> Any:
    if not isinstance(content, str) or content not in allowed:
        raise ValueError(f"the {kind} {_shown(content)} is not allowed; allowed are {', '.join(allowed)}")
    return allowed[content]


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
