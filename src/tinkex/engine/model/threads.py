"""The math threads: their number, and access to torch's thread team."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_void_p, cast
from pathlib import Path

import torch

__all__ = ["compute_with_threads", "threads", "torch_team"]


def compute_with_threads(count: int) -> None:
    """Sets the number of math threads of this thread, itself included, for torch and for the compiled core."""
    torch.set_num_threads(count)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Computes with so many threads while the block runs; 0 changes nothing.

    Example:
        >>> with threads(1):
        ...     torch.get_num_threads()
        1
    """
    usual = torch.get_num_threads()
    if count in (0, usual):
        yield
        return
    compute_with_threads(count)
    try:
        yield
    finally:
        compute_with_threads(usual)


def torch_team() -> int | None:
    """The address of ``GOMP_parallel`` in the OpenMP runtime that torch uses; None if there is none.

    Every OpenMP runtime that torch comes with on Linux has it, Intel's and LLVM's too. torch's threads spin for a while
    after a product, so a separate pool would compete with them for the processors.

    Example:
        >>> torch_team() is not None
        True
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Only the library that is already loaded; a lookup includes its dependencies.
        runtime = CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return cast(runtime.GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None
