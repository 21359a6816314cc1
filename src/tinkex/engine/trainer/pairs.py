"""The low-rank pairs of a projection in training: what they add, and their gradients, by torch or by the compiled core.

Shapes: T packed rows, n rows of one tenant, I and O inputs and outputs of joined projections, R rank, M the ranks
of joined projections together, W = parts · the largest rank.
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
from tinkex.engine.kernels.layout import MAX_PARTS, PairsC, TenantC
from tinkex.engine.model.threads import torch_team
from tinkex.engine.model.transformer import Transformer

__all__ = ["CompiledPairs", "LowRank", "Pair", "PairMath", "TorchPairs", "choose_pair_math"]


@dataclass(frozen=True)
class Pair:
    """One projection's A and B, its columns of joined outputs, and where the gradients of A and B add up."""

    columns: slice
    a_RI: Tensor
    b_OR: Tensor
    grads: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class LowRank:
    """One tenant's pairs on joined projections, for the rows that are that tenant's."""

    rows: slice
    scale: float
    pairs: Sequence[Pair]

    @cached_property
    def joined_a(self) -> Tensor:
        """The halves A one below the other, (M, I), which share a product with the inputs."""
        halves = [pair.a_RI for pair in self.pairs]
        return halves[0] if len(halves) == 1 else torch.cat(halves)

    @property
    def rank(self) -> int:
        """The rank of every pair."""
        return len(self.pairs[0].a_RI)

    def ranks(self, number: int) -> slice:
        """Where a pair's ranks lie among those of all."""
        return slice(number * self.rank, (number + 1) * self.rank)


class PairMath(Protocol):
    """What computes low-rank pairs."""

    def add(self, x_TI: Tensor, out_TO: Tensor, low_ranks: Sequence[LowRank]) -> Sequence[Tensor]:
        """Adds each tenant's ``scale · x Aᵀ Bᵀ`` to ``out_TO``; returns what the way back needs."""
        ...

    def add_gradients(
        self,
        grad_TO: Tensor,
        x_TI: Tensor,
        kept: Sequence[Tensor],
        grad_TI: Tensor | None,
        low_ranks: Sequence[LowRank],
    ) -> None:
        """Adds the gradients of the pairs to their buffers, and of the inputs to ``grad_TI`` if it is given."""
        ...


class TorchPairs:
    """Pairs of any dtype, tenant by tenant.

    Example:
        >>> TorchPairs().add(x_TI, out_TO, low_ranks)  # changes out_TO
    """

    def add(self, x_TI: Tensor, out_TO: Tensor, low_ranks: Sequence[LowRank]) -> Sequence[Tensor]:
        """Adds each tenant's ``scale · x Aᵀ Bᵀ``; keeps ``x Aᵀ``."""
        kept = []
        for low in low_ranks:
            u_nM = x_TI[low.rows] @ low.joined_a.T
            for number, pair in enumerate(low.pairs):
                out_TO[low.rows, pair.columns].addmm_(
                    u_nM[:, low.ranks(number)], pair.b_OR.T, alpha=low.scale
                )
            kept.append(u_nM)
        return kept

    def add_gradients(
        self,
        grad_TO: Tensor,
        x_TI: Tensor,
        kept: Sequence[Tensor],
        grad_TI: Tensor | None,
        low_ranks: Sequence[LowRank],
    ) -> None:
        """Adds the gradients of the pairs and of the inputs."""
        for low, u_nM in zip(low_ranks, kept, strict=True):
            v_nM = torch.empty_like(u_nM)
            for number, pair in enumerate(low.pairs):
                torch.mm(grad_TO[low.rows, pair.columns], pair.b_OR, out=v_nM[:, low.ranks(number)])
            v_nM.mul_(low.scale)
            if grad_TI is not None:
                grad_TI[low.rows].addmm_(v_nM, low.joined_a)
            grad_a_MI = v_nM.T @ x_TI[low.rows]
            for number, pair in enumerate(low.pairs):
                if pair.grads is not None:
                    grad_a_RI, grad_b_OR = pair.grads
                    ranks = low.ranks(number)
                    grad_a_RI.add_(grad_a_MI[ranks])
                    # uᵀ·grad reads the wide gradient row by row; gradᵀ·u takes half as long again.
                    grad_b_RO = u_nM[:, ranks].T @ grad_TO[low.rows, pair.columns]
                    grad_b_OR.add_(grad_b_RO.T, alpha=low.scale)


class CompiledPairs:
    """Pairs in fp32, all tenants in one call of the core: many small ones cost about as much as one large one.

    ``team`` is where torch's threads are found; see ``torch_team``.

    Example:
        >>> CompiledPairs(load_core(), team).add(x_TI, out_TO, low_ranks)  # changes out_TO
    """

    def __init__(self, core: Core, team: int) -> None:
        self._core = core
        self._team = team

    def add(self, x_TI: Tensor, out_TO: Tensor, low_ranks: Sequence[LowRank]) -> Sequence[Tensor]:
        """Adds each tenant's ``scale · x Aᵀ Bᵀ``; keeps ``scale · x Aᵀ``."""
        x_TI = _row_by_row(x_TI)
        assert out_TO.stride(1) == 1
        rows = _described(x_TI, low_ranks)
        narrow_TW = x_TI.new_empty(len(x_TI), rows.num_parts * rows.max_rank)
        rows.narrow = narrow_TW.data_ptr()
        rows.out, rows.out_stride = out_TO.data_ptr(), out_TO.stride(0)
        self._core.add_pairs(rows, self._team, torch.get_num_threads())
        return [narrow_TW]

    def add_gradients(
        self,
        grad_TO: Tensor,
        x_TI: Tensor,
        kept: Sequence[Tensor],
        grad_TI: Tensor | None,
        low_ranks: Sequence[LowRank],
    ) -> None:
        """Adds the gradients of the pairs and of the inputs."""
        [narrow_TW] = kept
        x_TI, grad_TO = _row_by_row(x_TI), _row_by_row(grad_TO)
        rows = _described(x_TI, low_ranks)
        narrow_grad_TW = torch.empty_like(narrow_TW)
        rows.narrow, rows.narrow_grad = narrow_TW.data_ptr(), narrow_grad_TW.data_ptr()
        rows.grad_out, rows.grad_out_stride = grad_TO.data_ptr(), grad_TO.stride(0)
        if grad_TI is not None:
            rows.grad_x, rows.grad_x_stride = grad_TI.data_ptr(), grad_TI.stride(0)
        self._core.add_pair_gradients(rows, self._team, torch.get_num_threads())


def choose_pair_math(model: Transformer) -> PairMath:
    """The compiled core where it is there, computes in this model's dtype and finds torch's threads; else torch.

    Example:
        >>> choose_pair_math(model)  # doctest: +ELLIPSIS
        <tinkex.engine.trainer.pairs.CompiledPairs object at ...>
    """
    team = torch_team()
    if team is not None and model.dtype == torch.float32 and model.embedding_VD.device.type == "cpu":
        try:
            return CompiledPairs(load_core(), team)
        except CoreUnavailable:
            pass
    return TorchPairs()


def _row_by_row(matrix: Tensor) -> Tensor:
    """The matrix itself, or a copy if its rows are not contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _described(x_TI: Tensor, low_ranks: Sequence[LowRank]) -> PairsC:
    """What the core is told of the inputs and the pairs; they must outlive it."""
    parts = sorted({(pair.columns.start, pair.columns.stop) for low in low_ranks for pair in low.pairs})
    numbers = {start: number for number, (start, _) in enumerate(parts)}
    tenants = (TenantC * len(low_ranks))(*(_tenant(low, numbers) for low in low_ranks))
    rows = PairsC(
        x_TI.shape[1],
        len(parts),
        len(tenants),
        max(low.rank for low in low_ranks),
        (c_int64 * MAX_PARTS)(*(start for start, _ in parts)),
        (c_int64 * MAX_PARTS)(*(stop - start for start, stop in parts)),
        tenants,
    )
    rows.x, rows.x_stride = x_TI.data_ptr(), x_TI.stride(0)
    return rows


def _tenant(low: LowRank, numbers: dict[int, int]) -> TenantC:
    a, b, grad_a, grad_b = ((c_void_p * MAX_PARTS)() for _ in range(4))
    for pair in low.pairs:
        number = numbers[pair.columns.start]
        _point(a, b, number, pair.a_RI, pair.b_OR)
        if pair.grads is not None:
            _point(grad_a, grad_b, number, *pair.grads)
    num_rows = low.rows.stop - low.rows.start
    return TenantC(low.rows.start, num_rows, low.rank, low.scale, a, b, grad_a, grad_b)


def _point(a: Array[c_void_p], b: Array[c_void_p], number: int, a_RI: Tensor, b_OR: Tensor) -> None:
    assert a_RI.is_contiguous()
    assert b_OR.is_contiguous()
    a[number], b[number] = a_RI.data_ptr(), b_OR.data_ptr()
