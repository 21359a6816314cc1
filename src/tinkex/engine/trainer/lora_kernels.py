"""LoRA of a projection in training: its forward and backward pass, by torch or by the compiled core.

Shapes: T packed rows, n rows of one tenant, I and O inputs and outputs of fused projections, R rank, M the ranks of fused
projections together, W = parts · the largest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from tinkex.engine.kernels import Core, CoreUnavailable, load_core
from tinkex.engine.kernels.layout import MAX_PARTS, LoraPassC, TenantC
from tinkex.engine.model.threads import torch_team
from tinkex.engine.model.transformer import Transformer

__all__ = [
    "CompiledLoraKernel",
    "LoraKernel",
    "LoraPair",
    "TenantLora",
    "TorchLoraKernel",
    "choose_lora_kernel",
]


@dataclass(frozen=True)
class LoraPair:
    """A and B of one projection, its columns of the fused outputs, and the buffers that accumulate their gradients."""

    columns: slice
    a_RI: Tensor
    b_OR: Tensor
    grads: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class TenantLora:
    """One tenant's LoRA on fused projections, and the tenant's rows."""

    rows: slice
    scale: float
    pairs: Sequence[LoraPair]

    @cached_property
    def stacked_a(self) -> Tensor:
        """All A matrices stacked, (M, I), for one product with the inputs."""
        matrices = [pair.a_RI for pair in self.pairs]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    @property
    def rank(self) -> int:
        """The rank, the same for every projection."""
        return len(self.pairs[0].a_RI)

    def ranks(self, part: int) -> slice:
        """The ranks of one projection among those of ``stacked_a``."""
        return slice(part * self.rank, (part + 1) * self.rank)


class LoraKernel(Protocol):
    """Computes LoRA."""

    def forward(self, x_TI: Tensor, out_TO: Tensor, loras: Sequence[TenantLora]) -> Sequence[Tensor]:
        """Adds each tenant's ``scale · x Aᵀ Bᵀ`` to ``out_TO``; returns what ``backward`` needs."""
        ...

    def backward(
        self,
        grad_TO: Tensor,
        x_TI: Tensor,
        saved: Sequence[Tensor],
        grad_TI: Tensor | None,
        loras: Sequence[TenantLora],
    ) -> None:
        """Adds the gradients of A and B to their buffers, and of the inputs to ``grad_TI`` if given."""
        ...


class TorchLoraKernel:
    """LoRA in any dtype, tenant by tenant.

    Example:
        >>> TorchLoraKernel().forward(x_TI, out_TO, loras)  # changes out_TO
    """

    def forward(self, x_TI: Tensor, out_TO: Tensor, loras: Sequence[TenantLora]) -> Sequence[Tensor]:
        """Adds each tenant's ``scale · x Aᵀ Bᵀ``; returns ``x Aᵀ``."""
        saved = []
        for lora in loras:
            u_nM = x_TI[lora.rows] @ lora.stacked_a.T
            for part, pair in enumerate(lora.pairs):
                out_TO[lora.rows, pair.columns].addmm_(
                    u_nM[:, lora.ranks(part)], pair.b_OR.T, alpha=lora.scale
                )
            saved.append(u_nM)
        return saved

    def backward(
        self,
        grad_TO: Tensor,
        x_TI: Tensor,
        saved: Sequence[Tensor],
        grad_TI: Tensor | None,
        loras: Sequence[TenantLora],
    ) -> None:
        """Adds the gradients of A, B and the inputs."""
        for lora, u_nM in zip(loras, saved, strict=True):
            v_nM = torch.empty_like(u_nM)
            for part, pair in enumerate(lora.pairs):
                torch.mm(grad_TO[lora.rows, pair.columns], pair.b_OR, out=v_nM[:, lora.ranks(part)])
            v_nM.mul_(lora.scale)
            if grad_TI is not None:
                grad_TI[lora.rows].addmm_(v_nM, lora.stacked_a)
            grad_a_MI = v_nM.T @ x_TI[lora.rows]
            for part, pair in enumerate(lora.pairs):
                if pair.grads is not None:
                    grad_a_RI, grad_b_OR = pair.grads
                    ranks = lora.ranks(part)
                    grad_a_RI.add_(grad_a_MI[ranks])
                    # uᵀ·grad reads the wide gradient row by row; gradᵀ·u takes 1.5 times as long.
                    grad_b_RO = u_nM[:, ranks].T @ grad_TO[lora.rows, pair.columns]
                    grad_b_OR.add_(grad_b_RO.T, alpha=lora.scale)


class CompiledLoraKernel:
    """LoRA in fp32, all tenants in one call of the core: many small tenants cost about as much as one large one.

    ``team`` runs a function on torch's threads; see ``torch_team``.

    Example:
        >>> CompiledLoraKernel(load_core(), team).forward(x_TI, out_TO, loras)  # changes out_TO
    """

    def __init__(self, core: Core, team: int) -> None:
        self._core = core
        self._team = team

    def forward(self, x_TI: Tensor, out_TO: Tensor, loras: Sequence[TenantLora]) -> Sequence[Tensor]:
        """Adds each tenant's ``scale · x Aᵀ Bᵀ``; returns ``scale · x Aᵀ``."""
        x_TI = _with_contiguous_rows(x_TI)
        assert out_TO.stride(1) == 1
        rows = _lora_pass(x_TI, loras)
        shrunk_TW = x_TI.new_empty(len(x_TI), rows.num_parts * rows.max_rank)
        rows.shrunk = shrunk_TW.data_ptr()
        rows.out, rows.out_stride = out_TO.data_ptr(), out_TO.stride(0)
        self._core.lora_forward(rows, self._team, torch.get_num_threads())
        return [shrunk_TW]

    def backward(
        self,
        grad_TO: Tensor,
        x_TI: Tensor,
        saved: Sequence[Tensor],
        grad_TI: Tensor | None,
        loras: Sequence[TenantLora],
    ) -> None:
        """Adds the gradients of A, B and the inputs."""
        [shrunk_TW] = saved
        x_TI, grad_TO = _with_contiguous_rows(x_TI), _with_contiguous_rows(grad_TO)
        rows = _lora_pass(x_TI, loras)
        shrunk_grad_TW = torch.empty_like(shrunk_TW)
        rows.shrunk, rows.shrunk_grad = shrunk_TW.data_ptr(), shrunk_grad_TW.data_ptr()
        rows.grad_out, rows.grad_out_stride = grad_TO.data_ptr(), grad_TO.stride(0)
        if grad_TI is not None:
            rows.grad_x, rows.grad_x_stride = grad_TI.data_ptr(), grad_TI.stride(0)
        self._core.lora_backward(rows, self._team, torch.get_num_threads())


def choose_lora_kernel(model: Transformer) -> LoraKernel:
    """The compiled core, if it is available, supports the model's dtype and can use torch's threads; else torch.

    Example:
        >>> choose_lora_kernel(model)  # doctest: +ELLIPSIS
        <tinkex.engine.trainer.lora_kernels.CompiledLoraKernel object at ...>
    """
    team = torch_team()
    if team is not None and model.dtype == torch.float32 and model.embedding_VD.device.type == "cpu":
        try:
            return CompiledLoraKernel(load_core(), team)
        except CoreUnavailable:
            pass
    return TorchLoraKernel()


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    """The matrix itself, or a copy if its rows are not contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _lora_pass(x_TI: Tensor, loras: Sequence[TenantLora]) -> LoraPassC:
    """The C structure of a pass; the tensors must outlive it."""
    parts = sorted({(pair.columns.start, pair.columns.stop) for lora in loras for pair in lora.pairs})
    parts_by_start = {start: part for part, (start, _) in enumerate(parts)}
    tenants = (TenantC * len(loras))(*(_tenant(lora, parts_by_start) for lora in loras))
    rows = LoraPassC(
        x_TI.shape[1],
        len(parts),
        len(tenants),
        max(lora.rank for lora in loras),
        (c_int64 * MAX_PARTS)(*(start for start, _ in parts)),
        (c_int64 * MAX_PARTS)(*(stop - start for start, stop in parts)),
        tenants,
    )
    rows.x, rows.x_stride = x_TI.data_ptr(), x_TI.stride(0)
    return rows


def _tenant(lora: TenantLora, parts_by_start: dict[int, int]) -> TenantC:
    a, b, grad_a, grad_b = ((c_void_p * MAX_PARTS)() for _ in range(4))
    for pair in lora.pairs:
        part = parts_by_start[pair.columns.start]
        _point(a, b, part, pair.a_RI, pair.b_OR)
        if pair.grads is not None:
            _point(grad_a, grad_b, part, *pair.grads)
    num_rows = lora.rows.stop - lora.rows.start
    return TenantC(lora.rows.start, num_rows, lora.rank, lora.scale, a, b, grad_a, grad_b)


def _point(a: Array[c_void_p], b: Array[c_void_p], part: int, a_RI: Tensor, b_OR: Tensor) -> None:
    assert a_RI.is_contiguous()
    assert b_OR.is_contiguous()
    a[part], b[part] = a_RI.data_ptr(), b_OR.data_ptr()
