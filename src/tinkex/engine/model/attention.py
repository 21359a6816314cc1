"""Attention over packed sequences, without padding; no sequence attends to another.

Shapes: T packed rows, H heads, K key/value heads, d head dimension, L length of one sequence, N sequences
of that length, W sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tinkex.engine.model.architecture import Architecture

__all__ = ["Attend", "packed_causal"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q_THd, k_TKd, v_TKd) -> out_THd``; q and k are already rotated."""


def packed_causal(lengths: Sequence[int], arch: Architecture) -> Attend:
    """Causal attention within each of the sequences packed one after the other, differentiable.

    Neighbours of equal length are computed in one call, so packing by length is faster. There are ``sum(lengths)`` rows;
    sliding-window layers attend only to their window.

    Example:
        >>> attend = packed_causal([3, 5], model.arch)
        >>> hidden_TD = model.hidden(tokens_T, positions_T, attend)  # 8 rows
    """
    groups = [(length, len(list(same))) for length, same in groupby(lengths) if length > 0]
    rows = [length * count for length, count in groups]

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        window = arch.window(layer)
        pieces = zip(
            groups,
            q_THd.split_with_sizes(rows),
            k_TKd.split_with_sizes(rows),
            v_TKd.split_with_sizes(rows),
            strict=True,
        )
        outputs = [_equal_lengths(count, length, q, k, v, window) for (length, count), q, k, v in pieces]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    return attend


def _equal_lengths(count: int, length: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of ``count`` packed sequences of one ``length``."""
    q_NHLd, k_NKLd, v_NKLd = (
        rows.view(count, length, rows.shape[1], rows.shape[2]).transpose(1, 2) for rows in (q, k, v)
    )
    if window is None or window >= length:
        out_NHLd = scaled_dot_product_attention(q_NHLd, k_NKLd, v_NKLd, is_causal=True, enable_gqa=True)
    else:
        out_NHLd = _sliding(q_NHLd, k_NKLd, v_NKLd, window)
    return out_NHLd.transpose(1, 2).reshape(count * length, q.shape[1], q.shape[2])


def _sliding(q_NHLd: Tensor, k_NKLd: Tensor, v_NKLd: Tensor, window: int) -> Tensor:
    """Queries in blocks of one window against the two windows of keys they attend to: O(L·W), not O(L²)."""
    length = q_NHLd.shape[2]
    outputs = []
    for start in range(0, length, window):
        end = min(start + window, length)
        first_key = max(0, start - window + 1)
        queries = torch.arange(start, end)[:, None]
        keys = torch.arange(first_key, end)[None, :]
        visible = (keys <= queries) & (keys > queries - window)
        outputs.append(
            scaled_dot_product_attention(
                q_NHLd[:, :, start:end],
                k_NKLd[:, :, first_key:end],
                v_NKLd[:, :, first_key:end],
                attn_mask=visible,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, dim=2)
