"""Division of integers, checked before it runs: processors raise a signal for a quotient that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

__all__ = ["checked_division"]


def checked_division(divide: Callable[..., Any], *, only_rounded: bool = False) -> Callable[..., Any]:
    """The division ``divide(dividend, divisor)``, which rejects the smallest integer divided by −1 with ``ValueError``.

    That quotient is one more than the largest integer, and computing it, or its remainder, ends the process with SIGFPE.
    ``only_rounded`` is for functions that divide integers as floats unless they are given a ``rounding_mode``.

    >>> checked_division(torch.floor_divide)(torch.tensor(7), torch.tensor(-1)).item()
    -7
    """

    @wraps(divide)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not only_rounded or kwargs.get("rounding_mode") is not None:
            operands = [*args, *(kwargs[name] for name in ("self", "input", "other") if name in kwargs)]
            if len(operands) >= 2:
                _check(operands[0], operands[1])
        return divide(*args, **kwargs)

    return checked


def _check(dividend: Any, divisor: Any) -> None:
    numbers = [value for value in (dividend, divisor) if isinstance(value, Tensor | int)]
    if len(numbers) < 2 or not any(isinstance(value, Tensor) for value in numbers):
        return  # Python's own integers have no limit, and whatever else is given, torch rejects
    dtype = torch.result_type(dividend, divisor)
    if dtype.is_floating_point or dtype in {torch.bool, torch.uint8}:
        return
    minus_one = torch.as_tensor(divisor).to(dtype) == -1
    if (
        minus_one.any()
        and (minus_one & (torch.as_tensor(dividend).to(dtype) == torch.iinfo(dtype).min)).any()
    ):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"it divides the smallest {name} by -1, and the quotient is not an {name}")
