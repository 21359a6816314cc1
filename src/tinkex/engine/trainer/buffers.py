"""Gradient buffers that are used again: a fresh one costs a page fault for every 4 KB, more than a pass of a few rows."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SpareBuffers"]


class SpareBuffers:
    """Flat buffers nobody needs any more, up to ``most_bytes`` of them, to be handed out again as zeros.

    Whoever gives a buffer back must hold the last reference to it. Not for several threads at once.

    Example:
        >>> spare = SpareBuffers(most_bytes=2**20)
        >>> spare.give_back(spare.zeros_like(torch.ones(3)))
        >>> spare.zeros_like(torch.ones(3))
        tensor([0., 0., 0.])
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._spare: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """What the spare buffers take up."""
        return sum(buffer.nbytes for buffer in self._spare)

    def zeros_like(self, params: Tensor) -> Tensor:
        """A buffer of zeros of the size and dtype of ``params``."""
        for number, buffer in enumerate(self._spare):
            if buffer.shape == params.shape and buffer.dtype == params.dtype:
                return self._spare.pop(number).zero_()
        return torch.zeros_like(params)

    def give_back(self, buffer: Tensor | None) -> None:
        """Keeps a buffer for later; those longest unused make room for it."""
        if buffer is None or buffer.nbytes > self._most_bytes:
            return
        self._spare.append(buffer)
        while self.num_bytes > self._most_bytes:
            del self._spare[0]

    def clear(self) -> None:
        """Gives the memory of all spare buffers back to the system."""
        self._spare.clear()
