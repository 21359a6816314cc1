"""Reads the metadata of a GGUF file, without its weights and without dependencies."""

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
_MAX_ITEMS = 1 << 26
"""Limits the memory that a corrupt file can allocate; valid files have shorter arrays."""
_MAX_DEPTH = 4
"""How deep arrays may be nested; valid files do not nest them."""


def read_metadata(file: Path) -> dict[str, Any]:
    """Returns the key-value pairs at the start of a GGUF file; the weights are not read.

    Example:
        >>> read_metadata(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))["general.architecture"]
        'llama'
    """
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _MetadataReader(content).pairs()
    except (OSError, ValueError, OverflowError, struct.error, IndexError) as error:
        raise SetupError(f"{file} cannot be read as a GGUF file ({error}); download it again") from error


class _MetadataReader:
    """Parses the bytes; every number in the format is little-endian."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._offset = 0

    def pairs(self) -> dict[str, Any]:
        magic, version, _, count = self._numbers("4sIQQ")
        if magic != b"GGUF":
            raise ValueError("it does not start with the magic bytes GGUF")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, only 2 and 3 are supported")
        return {self._text(): self._value(self._number("I")) for _ in range(count)}

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            item, count = self._numbers("IQ")
            if count > _MAX_ITEMS or depth > _MAX_DEPTH:
                raise ValueError(f"an array of {count} items at depth {depth} is too large")
            if item in _NUMBERS:
                return list(self._numbers(f"{count}{_NUMBERS[item]}"))
            return [self._value(item, depth + 1) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"unknown value type {kind}")
        return self._number(_NUMBERS[kind])

    def _text(self) -> str:
        length = self._number("Q")
        end = self._offset + length
        if end > len(self._content):
            raise ValueError("it ends inside a string")
        text = self._content[self._offset : end].decode("utf-8")
        self._offset = end
        return text

    def _number(self, form: str) -> Any:
        return self._numbers(form)[0]

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._content, self._offset)
        self._offset += struct.calcsize(f"<{form}")
        return found
