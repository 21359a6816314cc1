"""How many threads compute."""

from __future__ import annotations

import torch


def compute_with_threads(count: int) -> None:
    """Let this thread compute with so many threads, itself included; holds for torch and for the compiled core."""
    torch.set_num_threads(count)
