"""A pool of gradient buffers: a new buffer costs a page fault for every 4 KB, more than a pass of a few rows."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BufferPool"]


class BufferPool:
    """Free flat buffers, up to ``max_bytes`` of them, for reuse.

    The caller of ``release`` must hold the last reference to the buffer. Not thread-safe.

    Example:
        >>> pool = BufferPool(max_bytes=2**20)
        >>> pool.release(pool.zeros_like(torch.ones(3)))
        >>> pool.zeros_like(torch.ones(3))
        tensor([0., 0., 0.])
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._free: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(buffer.nbytes for buffer in self._free)

    def zeros_like(self, params: Tensor) -> Tensor:
        """A buffer of zeros with the shape and dtype of ``params``."""
        for number, buffer in enumerate(self._free):
            if buffer.shape == params.shape and buffer.dtype == params.dtype:
                return self._free.pop(number).zero_()
        return torch.zeros_like(params)

    def release(self, buffer: Tensor | None) -> None:
        """Returns a buffer to the pool; the least recently released are dropped to fit it."""
        if buffer is None or buffer.nbytes > self._max_bytes:
            return
        self._free.append(buffer)
        while self.num_bytes > self._max_bytes:
            del self._free[0]

    def clear(self) -> None:
        """Drops all free buffers."""
        self._free.clear()
