"""The arguments of the nodes of a custom loss: parsed from JSON, and substituted when the graph runs.

On the wire, JSON scalars, strings and lists stand for themselves; everything else is an object with one key, such as
``{"ref": "exp"}`` for the result of another node or ``{"slice": [null, -1, null]}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinkex.engine.trainer.loss_ops import DTYPES, STRINGS

__all__ = ["INTEGER_LIMIT", "ArgumentReader", "Ref", "references", "substitute"]

INTEGER_LIMIT = 2**63  # integers are smaller than this
_MAX_DEPTH = 8
_MAX_LIST_LENGTH = 1024
_MAX_STRING_LENGTH = 200
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
    """Parses arguments; ``known`` has the nodes that can be referred to, ``max_values`` bounds all arguments together.

    Raises ``ValueError``, which names it, for an argument that is not allowed.

    Example:
        >>> ArgumentReader({"exp"}, max_values=100).read({"tuple": [{"ref": "exp"}, 2]})
        (Ref(name='exp'), 2)
    """

    def __init__(self, known: set[str], max_values: int) -> None:
        self._known = known
        self._left = max_values

    def read(self, written: Any, *, any_string: bool = False, depth: int = 0) -> Any:
        """One argument; ``any_string`` allows any short string, otherwise only those of ``STRINGS``."""
        self._left -= 1
        if self._left < 0:
            raise ValueError("with it, the graph has too many arguments")
        if depth > _MAX_DEPTH:
            raise ValueError(f"its arguments are nested more than {_MAX_DEPTH} deep")
        if written is None or isinstance(written, bool):
            return written
        if isinstance(written, int | float):
            return _number(written)
        if isinstance(written, str):
            return _string(written, any_string=any_string)
        if isinstance(written, list | tuple):
            return self._list(written, depth)
        if isinstance(written, Mapping) and len(written) == 1:
            [(kind, content)] = written.items()
            return self._object(kind, content, depth)
        raise ValueError(f"an argument is {_abbreviated(written)}, which is not a value of a graph")

    def _list(self, written: Any, depth: int) -> list[Any]:
        if not isinstance(written, list | tuple):
            raise ValueError(f"{_abbreviated(written)} must be a list")
        if len(written) > _MAX_LIST_LENGTH:
            raise ValueError(f"a list has {len(written)} entries; at most {_MAX_LIST_LENGTH} are allowed")
        return [self.read(entry, depth=depth + 1) for entry in written]

    def _object(self, kind: Any, content: Any, depth: int) -> Any:
        readers: dict[str, Callable[[], Any]] = {
            "ref": lambda: self._ref(content),
            "tuple": lambda: tuple(self._list(content, depth)),
            "dict": lambda: self._dict(content, depth),
            "slice": lambda: self._slice(content, depth),
            "ellipsis": lambda: Ellipsis,
            "float": lambda: _lookup("float", content, _FLOATS),
            "dtype": lambda: _lookup("dtype", content, DTYPES),
            "device": lambda: _lookup("device", content, {"cpu": torch.device("cpu")}),
            "layout": lambda: _lookup("layout", content, {"strided": torch.strided}),
            "memory_format": lambda: _lookup("memory_format", content, _MEMORY_FORMATS),
        }
        if not isinstance(kind, str) or kind not in readers:
            raise ValueError(
                f"an argument is an object with the key {_abbreviated(kind)}; known are {', '.join(readers)}"
            )
        return readers[kind]()

    def _ref(self, name: Any) -> Ref:
        if not isinstance(name, str) or name not in self._known:
            raise ValueError(f"it refers to {_abbreviated(name)}, which is not an earlier node")
        return Ref(name)

    def _dict(self, content: Any, depth: int) -> dict[str, Any]:
        if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
            raise ValueError("a dict must have strings as keys")
        if len(content) > _MAX_LIST_LENGTH:
            raise ValueError(f"a dict has {len(content)} entries; at most {_MAX_LIST_LENGTH} are allowed")
        return {key: self.read(entry, depth=depth + 1) for key, entry in content.items()}

    def _slice(self, content: Any, depth: int) -> slice:
        ends = self._list(content, depth)
        if len(ends) != 3:
            raise ValueError("a slice is written [start, stop, step]")
        if not all(end is None or isinstance(end, Ref | int) for end in ends):
            raise ValueError("the ends of a slice must be integers, nodes or null")
        return slice(*ends)


def substitute(argument: Any, values: Mapping[str, Any]) -> Any:
    """An argument with its references replaced by the values of the nodes.

    >>> substitute((Ref("exp"), slice(None, Ref("n"))), {"exp": 2.5, "n": 3})
    (2.5, slice(None, 3, None))
    """
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return tuple(substitute(entry, values) for entry in argument)
    if isinstance(argument, list):
        return [substitute(entry, values) for entry in argument]
    if isinstance(argument, dict):
        return {key: substitute(entry, values) for key, entry in argument.items()}
    if isinstance(argument, slice):
        return slice(*(substitute(end, values) for end in (argument.start, argument.stop, argument.step)))
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
    if isinstance(written, int) and not -INTEGER_LIMIT < written < INTEGER_LIMIT:
        raise ValueError("an integer does not fit into 64 bits")
    return written


def _string(written: str, *, any_string: bool) -> str:
    if len(written) > _MAX_STRING_LENGTH:
        raise ValueError(f"a string has {len(written)} characters; at most {_MAX_STRING_LENGTH} are allowed")
    if not any_string and written not in STRINGS:
        raise ValueError(f"the string {written!r} is not an argument of an allowed operation")
    return written


def _lookup(kind: str, content: Any, allowed: Mapping[str, Any]) -> Any:
    if not isinstance(content, str) or content not in allowed:
        raise ValueError(
            f"the {kind} {_abbreviated(content)} is not allowed; allowed are {', '.join(allowed)}"
        )
    return allowed[content]


def _abbreviated(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
