"""Attention over a forest of prefixes: rows attend to their own node and to the nodes above it.

Shapes: T packed rows, H heads, K key/value heads, d head dimension, L length of one node, N nodes of that length,
W sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

from tinkex.engine.model.architecture import Architecture
from tinkex.engine.model.attention import Attend, packed_causal

__all__ = ["Node", "forest_causal"]

# What scaled_dot_product_attention calls; here, because it does not return the log-sum-exp.
_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


@dataclass(frozen=True)
class Node:
    """Rows ``start`` to ``stop``; those of its descendants follow, up to ``end``.

    Example:
        >>> prompt, answer = Node(0, 256, 320), Node(256, 320, 320)
    """

    start: int
    stop: int
    end: int

    @property
    def length(self) -> int:
        """Rows of its own."""
        return self.stop - self.start


def forest_causal(nodes: Sequence[Node], arch: Architecture) -> Attend:
    """Causal attention along each path from a root, differentiable; the nodes are in row order, depth first.

    Neighbours of equal length are computed in one call. Each pair of a row and a row that it attends to is computed once,
    and no key is copied.

    Example:
        >>> attend = forest_causal([Node(0, 4, 9), Node(4, 6, 6), Node(6, 9, 9)], model.arch)
        >>> hidden_TD = model.hidden(tokens_T, positions_T, attend)  # 9 rows
    """
    if all(node.stop == node.end for node in nodes):
        return packed_causal([node.length for node in nodes], arch)
    plan = _AttentionPlan(tuple(nodes))

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        window = arch.window(layer)
        if window is not None and window < plan.max_depth:
            return plan.windowed(q_THd, k_TKd, v_TKd, window)
        out_THd: Tensor = _ForestAttention.apply(q_THd, k_TKd, v_TKd, plan)  # type: ignore[no-untyped-call]  # torch's
        return out_THd

    return attend


@dataclass(frozen=True)
class _AttentionPlan:
    """The calls that attention over some nodes consists of."""

    nodes: tuple[Node, ...]

    @cached_property
    def groups(self) -> list[tuple[slice, int]]:
        """Neighbours of equal length: their rows, and how many they are."""
        groups, row = [], 0
        for length, same in groupby(node.length for node in self.nodes):
            count = len(list(same))
            groups.append((slice(row, row + count * length), count))
            row += count * length
        return groups

    @cached_property
    def shared(self) -> list[tuple[slice, slice]]:
        """The nodes with descendants: the rows of the descendants, and those of the node."""
        return [
            (slice(node.stop, node.end), slice(node.start, node.stop))
            for node in self.nodes
            if node.end > node.stop
        ]

    @cached_property
    def depths(self) -> Tensor:
        """The position of each row on its path."""
        depths_T = torch.empty(self.nodes[-1].stop, dtype=torch.int64)
        above: list[Node] = []
        for node in self.nodes:
            while above and above[-1].end <= node.start:
                above.pop()
            first = sum(ancestor.length for ancestor in above)
            depths_T[node.start : node.stop] = torch.arange(first, first + node.length)
            above.append(node)
        return depths_T

    @cached_property
    def max_depth(self) -> int:
        """The length of the longest path."""
        return int(self.depths.max()) + 1

    def windowed(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, window: int) -> Tensor:
        """Attention with a dense mask for every tree, because rows see only a part of the nodes above them."""
        outputs, row = [], 0
        while row < len(q_THd):
            root = next(node for node in self.nodes if node.start == row)
            visible = self._visible(root, window)
            q, k, v = (rows[root.start : root.end].transpose(0, 1)[None] for rows in (q_THd, k_TKd, v_TKd))
            out = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))
            row = root.end
        return torch.cat(outputs)

    def _visible(self, root: Node, window: int) -> Tensor:
        """Which rows of a tree (second dimension) each of its rows attends to."""
        rows = torch.arange(root.start, root.end)
        end_of_row = torch.empty(len(rows), dtype=torch.int64)
        for node in self.nodes:
            if root.start <= node.start < root.end:
                end_of_row[node.start - root.start : node.stop - root.start] = node.end
        depths = self.depths[root.start : root.end]
        is_above = (rows[None, :] <= rows[:, None]) & (rows[:, None] < end_of_row[None, :])
        return is_above & (depths[None, :] > depths[:, None] - window)


class _ForestAttention(Function):
    """Parts of attention, each with the log-sum-exp of its scores, merged.

    The gradient of a part by its own queries, keys and values needs only the merged output and log-sum-exp: with these,
    ``exp(score − lse)`` is the probability among all keys of the row.
    """

    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, plan: _AttentionPlan) -> Tensor:
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        lse_dtype = torch.promote_types(q_THd.dtype, torch.float32)
        lse_HT = q_THd.new_empty(q_THd.shape[1], len(q_THd), dtype=lse_dtype)
        for rows, count in plan.groups:
            q, k, v = (_heads_first(part[rows], count) for part in (q_THd, k_TKd, v_TKd))
            out_NHLd, lse_NHL = _flash_forward(q, k, v, is_causal=True)
            _heads_first(out_THd[rows], count).copy_(out_NHLd)
            _by_head(lse_HT[:, rows], count).copy_(lse_NHL)
        for below, above in plan.shared:
            q, k, v = (_heads_first(part) for part in (q_THd[below], k_TKd[above], v_TKd[above]))
            part_1HLd, lse_1HL = _flash_forward(q, k, v, is_causal=False)
            known_HL = lse_HT[:, below]
            merged_HL = torch.logaddexp(known_HL, lse_1HL[0])
            share_LH1 = torch.exp(lse_1HL[0] - merged_HL).T[:, :, None].to(out_THd.dtype)
            out_THd[below].lerp_(part_1HLd[0].transpose(0, 1), share_LH1)
            known_HL.copy_(merged_HL)
        ctx.save_for_backward(q_THd, k_TKd, v_TKd, out_THd, lse_HT)
        ctx.plan = plan
        return out_THd

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_THd,) = grad_outputs
        q_THd, k_TKd, v_TKd, out_THd, lse_HT = ctx.saved_tensors
        plan: _AttentionPlan = ctx.plan
        grads = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for part in (q_THd, k_TKd, v_TKd)
        ]
        for rows, count in plan.groups:
            grad, q, k, v, out = (
                _heads_first(part[rows], count) for part in (grad_THd, q_THd, k_TKd, v_TKd, out_THd)
            )
            lse = _by_head(lse_HT[:, rows], count).contiguous()
            parts = _flash_backward(grad, q, k, v, out, lse, 0.0, is_causal=True)
            for whole, part in zip(grads, parts, strict=True):
                _heads_first(whole[rows], count).copy_(part)
        for below, above in plan.shared:
            grad, q, out = (_heads_first(part[below]) for part in (grad_THd, q_THd, out_THd))
            k, v = _heads_first(k_TKd[above]), _heads_first(v_TKd[above])
            lse = lse_HT[None, :, below].contiguous()
            parts = _flash_backward(grad, q, k, v, out, lse, 0.0, is_causal=False)
            for whole, part, rows in zip(grads, parts, (below, above, above), strict=True):
                _heads_first(whole[rows]).add_(part)
        return (*grads, None)


def _heads_first(rows: Tensor, count: int = 1) -> Tensor:
    """Rows of ``count`` nodes of equal length as (N, H, L, d), without a copy."""
    return torch.unflatten(rows, 0, (count, -1)).transpose(1, 2)


def _by_head(lse_HT: Tensor, count: int) -> Tensor:
    """One number per head and row of ``count`` nodes of equal length as (N, H, L), without a copy."""
    return torch.unflatten(lse_HT, 1, (count, -1)).transpose(0, 1)
