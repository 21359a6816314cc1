"""Lines that update in place on a terminal."""

from __future__ import annotations

import os
from typing import TextIO

CLEAR = "\r\x1b[2K"
"""Clears the line and returns to its start."""


def is_live(stream: TextIO) -> bool:
    """Returns whether lines of a stream can be replaced: it is a terminal with control sequences.

    >>> import io
    >>> is_live(io.StringIO())
    False
    """
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def fitted(text: str, stream: TextIO) -> str:
    """Returns the part of a line that fits into the width of the terminal: a wrapped line could not be cleared.

    >>> import io
    >>> fitted("loading", io.StringIO())  # has no width
    'loading'
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return text
    return text[: columns - 1] if columns > 1 else text
