"""Products with frozen weights, by the library that computes them fastest on this processor.

torch multiplies fp32 matrices with MKL, which uses AVX-512 on Intel's processors only; oneDNN, which torch has too, uses it on
all. Which one is used depends only on processor and dtype, so a replay on the same machine gives the same bits.

Shapes: T rows, I and O inputs and outputs of a weight.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

__all__ = ["back_product", "linear", "linear_into"]

_BLOCK = 1024  # outputs computed at a time, so that they are copied while they are in a cache
_DEPTH = 4096  # terms of a sum at a time: one of the whole vocabulary takes an eighth longer


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x Wᵀ + bias``, without autograd.

    Example:
        >>> linear(torch.ones(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    if not _prefers_onednn(x_TI.dtype, x_TI.device.type):
        return torch_linear(x_TI, weight_OI, bias_O)
    return _onednn_linear(x_TI, weight_OI, bias_O)


def linear_into(x_TI: Tensor, weight_OI: Tensor, out_TO: Tensor) -> Tensor:
    """Writes ``x Wᵀ`` into ``out_TO``: for outputs so large that new memory for them takes time.

    Example:
        >>> linear_into(torch.ones(2, 3), torch.ones(4, 3), torch.empty(2, 4)).shape
        torch.Size([2, 4])
    """
    if not _prefers_onednn(x_TI.dtype, x_TI.device.type):
        return torch.mm(x_TI, weight_OI.T, out=out_TO)
    for first in range(0, len(weight_OI), _BLOCK):
        block = slice(first, first + _BLOCK)
        out_TO[:, block] = _onednn_linear(x_TI, weight_OI[block])
    return out_TO


def back_product(grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
    """``grad W``, without autograd: the gradient of the inputs of ``linear``.

    Example:
        >>> back_product(torch.ones(2, 4), torch.ones(4, 3)).shape
        torch.Size([2, 3])
    """
    if not _prefers_onednn(grad_TO.dtype, grad_TO.device.type):
        return grad_TO @ weight_OI
    first, *others = (slice(start, start + _DEPTH) for start in range(0, len(weight_OI), _DEPTH))
    product_TI = _onednn_linear(grad_TO[:, first], weight_OI[first].T)
    for block in others:
        product_TI += _onednn_linear(grad_TO[:, block], weight_OI[block].T)
    return product_TI


def _onednn_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")  # noqa: SLF001
    return out_TO


@cache
def _prefers_onednn(dtype: torch.dtype, device: str) -> bool:
    return (
        dtype == torch.float32
        and device == "cpu"
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and not _is_intel()
    )


def _is_intel() -> bool:
    """Whether MKL uses AVX-512 here; also if nothing says what processor this is."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
