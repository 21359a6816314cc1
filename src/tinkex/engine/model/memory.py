"""Whether an error says that memory ran out, whoever raised it."""

from __future__ import annotations

import torch

__all__ = ["out_of_memory"]


def out_of_memory(error: BaseException) -> bool:
    """True for Python's and torch's ways to say so; torch's allocator for the CPU has no type of its own.

    Example:
        >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
