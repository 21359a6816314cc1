"""Detects out-of-memory errors of Python, torch and the compiled core."""

from __future__ import annotations

import torch

__all__ = ["is_out_of_memory"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; torch's CPU allocator raises a plain ``RuntimeError``.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
