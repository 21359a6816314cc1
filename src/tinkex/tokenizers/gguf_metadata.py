"""Reads what a GGUF file says about its model, without its weights and without any package."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from tinkex.errors import SetupError

__all__ = ["read_metadata"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_VERSIONS = {2, 3}
_MOST_ITEMS = 1 << 26
"""No honest file has longer lists; a broken one must not ask for all the memory there is."""


def read_metadata(file: Path) -> dict[str, Any]:
    """The key-value pairs at the beginning of a GGUF file; the weights behind them are not touched.

    Example:
        >>> read_metadata(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))["general.architecture"]
        'llama'
    """
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).pairs()
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise SetupError(f"{file} cannot be read as a GGUF file ({error}); fetch it again") from error


class _Reader:
    """Walks through the bytes; every number in the format is little-endian."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._place = 0

    def pairs(self) -> dict[str, Any]:
        magic, version, _, count = self._numbers("4sIQQ")
        if magic != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, this reader knows 2 and 3")
        return {self._text(): self._value(self._number("I")) for _ in range(count)}

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            item, count = self._numbers("IQ")
            if count > _MOST_ITEMS:
                raise ValueError(f"a list of {count} items is no metadata")
            if item in _NUMBERS:
                return list(self._numbers(f"{count}{_NUMBERS[item]}"))
            return [self._value(item) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"values of kind {kind} are unknown")
        return self._number(_NUMBERS[kind])

    def _text(self) -> str:
        length = self._number("Q")
        end = self._place + length
        if end > len(self._content):
            raise ValueError("it ends in the middle of a text")
        text = self._content[self._place : end].decode("utf-8")
        self._place = end
        return text

    def _number(self, form: str) -> Any:
        return self._numbers(form)[0]

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._content, self._place)
        self._place += struct.calcsize(f"<{form}")
        return found
