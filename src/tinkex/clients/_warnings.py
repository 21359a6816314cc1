"""Warnings that point at the user's own line, however many of our functions are between."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

__all__ = ["warn_caller"]

PACKAGE = str(Path(__file__).parents[1])


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns at the line outside of this package that led to the call."""
    stacklevel = 1
    frame = sys._getframe()  # noqa: SLF001 - what the warnings module uses itself
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
        stacklevel += 1
    warnings.warn(message, category, stacklevel=stacklevel)
