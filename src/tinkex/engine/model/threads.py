"""The threads that compute: how many, and where torch's are found."""

from __future__ import annotations

import os
from ctypes import CDLL, c_void_p, cast
from pathlib import Path

import torch

__all__ = ["compute_with_threads", "torch_team"]


def compute_with_threads(count: int) -> None:
    """Let this thread compute with so many threads, itself included; holds for torch and for the compiled core."""
    torch.set_num_threads(count)


def torch_team() -> int | None:
    """Where ``GOMP_parallel`` of the OpenMP runtime that torch is linked to lies; None if it has none.

    Every OpenMP runtime torch comes with on Linux has it, Intel's and LLVM's too. torch's threads spin for a while
    after a product, so a pool of our own would share the processors with them.

    Example:
        >>> torch_team() is not None
        True
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Only what is loaded already: its dependencies are searched with it.
        runtime = CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return cast(runtime.GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None
