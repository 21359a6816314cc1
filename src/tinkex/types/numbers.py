"""Numbers as programs give them (numpy and torch scalars, 5.0 for 5), as the Python numbers that travel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

__all__ = ["settle_floats", "settle_ints"]


def settle_floats(value: Any, names: Iterable[str]) -> None:
    """Makes the named fields floats, or says which is none.

    >>> from tinkex.types import AdamParams
    >>> AdamParams(learning_rate="1e-3").learning_rate
    0.001
    """
    for name in names:
        given = getattr(value, name)
        if type(given) is not float:
            try:
                msgspec.structs.force_setattr(value, name, float(given))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{type(value).__name__}.{name} must be a number, got {given!r}") from error


def settle_ints(value: Any, names: Iterable[str], *, optional: bool = False) -> None:
    """Makes the named fields whole numbers (or leaves None, where ``optional``), or says which is none.

    >>> from tinkex.types import SamplingParams
    >>> SamplingParams(max_tokens=8.0).max_tokens
    8
    """
    for name in names:
        given = getattr(value, name)
        if type(given) is not int and not (optional and given is None):
            try:
                whole = int(given)
                if not isinstance(given, str) and whole != given:
                    raise ValueError("it has a fraction")
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"{type(value).__name__}.{name} must be a whole number, got {given!r}"
                ) from error
            msgspec.structs.force_setattr(value, name, whole)
