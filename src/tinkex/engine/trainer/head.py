"""From hidden states to logprobs and gradients, a few rows of logits at a time.

The logits of a whole batch never exist: each chunk of rows is projected on the vocabulary, normalized, read at its
targets and, if it trains, turned into gradients immediately. With ``g_k`` the derivative of the loss by the logprob of a
row's target ``k`` and ``c = Σ g_k``, its derivative by the logits is ``Σ g_k·onehot_k − c·p``. Both parts are linear, so
``g`` and ``c`` scale the smaller side of every product, and the (n, V) probabilities are never rewritten.

Shapes: T packed rows, n rows of a chunk, m their targets, P all targets, D hidden, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.model.products import back_product, linear_into
from tinkex.engine.trainer.batch import PackedBatch

__all__ = ["Head", "HeadLora", "TargetGradient"]

Ints = npt.NDArray[np.int64]
TargetGradient = Callable[[Ints, Tensor], Tensor]
"""``gradient(target numbers within the pass, their logprobs) -> d loss / d logprob``."""

_CHUNK_BYTES = 192 * 2**20  # of logits; the product with the vocabulary is efficient from about 700 rows on
_TARGET_BYTES = 64 * 2**20  # of vectors of single targets, of which a row can have thousands
_MIN_ROWS = 16


@dataclass(frozen=True)
class HeadLora:
    """The unembedding's A and B, and the buffers that accumulate their gradients, if it trains."""

    a_RD: Tensor
    b_VR: Tensor
    scale: float
    grad_a_RD: Tensor | None = None
    grad_b_VR: Tensor | None = None


@dataclass(frozen=True)
class _SegmentRows:
    """The rows of one segment in a chunk, and their targets."""

    segment: int
    rows: slice
    targets: slice


@dataclass(frozen=True)
class _Chunk:
    rows: Ints  # (n,) of the pass
    targets: Ints  # (m,) of the pass, row by row
    row_of_target: Tensor  # (m,) within the chunk
    pieces: list[_SegmentRows]


class Head:
    """The unembedding of a base model, with buffers that all passes share.

    ``loras`` has one entry per segment of the batch; None means base logits. ``max_rows`` bounds how many rows of logits
    exist at a time, ``max_targets`` how many vectors of targets; by default as many as fit a fixed amount of memory.

    Example:
        >>> head = Head(model.unembedding_VD)
        >>> head.score(hidden_TD, packed, [None], np.arange(len(packed.tokens_T)), lp_P)
    """

    def __init__(
        self, unembedding_VD: Tensor, *, max_rows: int | None = None, max_targets: int | None = None
    ) -> None:
        self._weight_VD = unembedding_VD
        vocab_size, hidden_size = unembedding_VD.shape
        fitting = max(_MIN_ROWS, _CHUNK_BYTES // (unembedding_VD.element_size() * vocab_size))
        self._max_rows = fitting if max_rows is None else max_rows
        fitting = max(1, _TARGET_BYTES // (unembedding_VD.element_size() * hidden_size))
        self._max_targets = fitting if max_targets is None else max_targets
        # Reused, because a new buffer of this size costs a page fault for every 4 KB.
        self._buffer_nV = unembedding_VD.new_empty(0, vocab_size)

    def score(
        self,
        hidden_TD: Tensor,
        packed: PackedBatch,
        loras: Sequence[HeadLora | None],
        rows: Ints,
        lp_P: Tensor,
    ) -> None:
        """Writes the logprobs of the targets of ``rows`` (ascending) into ``lp_P``."""
        for chunk in self._chunks(packed, rows):
            hidden_nD = hidden_TD[torch.from_numpy(chunk.rows)]
            logprobs_nV, _ = self._project(hidden_nD, chunk, loras)
            self._read(logprobs_nV, packed, chunk, lp_P)

    def train(
        self,
        hidden_TD: Tensor,
        packed: PackedBatch,
        loras: Sequence[HeadLora | None],
        rows: Ints,
        lp_P: Tensor,
        gradient: TargetGradient,
        grad_hidden_TD: Tensor,
    ) -> None:
        """Like ``score``, and also writes the gradient of ``rows`` into ``grad_hidden_TD``.

        Gradients of A and B are added to their buffers.
        """
        for chunk in self._chunks(packed, rows):
            row_numbers = torch.from_numpy(chunk.rows)
            hidden_nD = hidden_TD[row_numbers]
            logprobs_nV, shrunk = self._project(hidden_nD, chunk, loras)
            targets_m, lp_m = self._read(logprobs_nV, packed, chunk, lp_P)
            g_m = gradient(chunk.targets, lp_m)
            c_n1 = g_m.new_zeros(len(chunk.rows)).index_add_(0, chunk.row_of_target, g_m)[:, None]
            p_nV = logprobs_nV.exp_()
            grad_nD = back_product(p_nV, self._weight_VD).mul_(-c_n1)
            self._add(grad_nD, chunk.row_of_target, self._weight_VD, targets_m, g_m)
            for piece, u_nR in zip(chunk.pieces, shrunk, strict=True):
                lora = loras[piece.segment]
                if lora is None or u_nR is None:
                    continue
                local = chunk.row_of_target[piece.targets] - piece.rows.start
                targets, g_own = targets_m[piece.targets], g_m[piece.targets]
                p_rows, c_rows, hidden_rows = p_nV[piece.rows], c_n1[piece.rows], hidden_nD[piece.rows]
                v_nR = back_product(p_rows, lora.b_VR).mul_(-c_rows)
                self._add(v_nR, local, lora.b_VR, targets, g_own)
                grad_nD[piece.rows].addmm_(v_nR, lora.a_RD, alpha=lora.scale)
                if lora.grad_a_RD is not None and lora.grad_b_VR is not None:
                    lora.grad_a_RD.addmm_(v_nR.T, hidden_rows, alpha=lora.scale)
                    # uᵀ·p reads the probabilities row by row; pᵀ·u takes 1.5 times as long.
                    lora.grad_b_VR.add_(((u_nR * -c_rows).T @ p_rows).T, alpha=lora.scale)
                    self._add(lora.grad_b_VR, targets, u_nR, local, g_own, lora.scale)
            grad_hidden_TD[row_numbers] = grad_nD

    def _chunks(self, packed: PackedBatch, rows: Ints) -> Iterator[_Chunk]:
        first_target = packed.first_target_T1
        for chunk_rows in np.array_split(rows, -(-len(rows) // self._max_rows)) if len(rows) else ():
            counts = first_target[chunk_rows + 1] - first_target[chunk_rows]
            ends = np.cumsum(counts)
            row_of_target = np.repeat(np.arange(len(chunk_rows)), counts)
            places = np.repeat(first_target[chunk_rows] - (ends - counts), counts) + np.arange(ends[-1])
            targets = packed.targets_by_row_P[places]
            pieces = []
            for number, segment in enumerate(packed.segments):
                a, b = (int(i) for i in np.searchsorted(chunk_rows, (segment.rows.start, segment.rows.stop)))
                if a < b:
                    pieces.append(
                        _SegmentRows(number, slice(a, b), slice(int(ends[a] - counts[a]), int(ends[b - 1])))
                    )
            yield _Chunk(chunk_rows, targets, torch.from_numpy(row_of_target), pieces)

    def _project(
        self, hidden_nD: Tensor, chunk: _Chunk, loras: Sequence[HeadLora | None]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Logprobs over the vocabulary, in a shared buffer, and ``hidden Aᵀ`` of each segment with LoRA."""
        num_rows = len(hidden_nD)
        if len(self._buffer_nV) < num_rows:
            self._buffer_nV = self._buffer_nV.new_empty(num_rows, self._buffer_nV.shape[1])
        logits_nV = linear_into(hidden_nD, self._weight_VD, self._buffer_nV[:num_rows])
        shrunk: list[Tensor | None] = []
        for piece in chunk.pieces:
            lora = loras[piece.segment]
            u_nR = None if lora is None else hidden_nD[piece.rows] @ lora.a_RD.T
            if lora is not None and u_nR is not None:
                logits_nV[piece.rows].addmm_(u_nR, lora.b_VR.T, alpha=lora.scale)
            shrunk.append(u_nR)
        # In place: each logit is read for its row's maximum and sum before its logprob is written.
        return torch.log_softmax(logits_nV, dim=-1, out=logits_nV), shrunk

    def _add(
        self, sums: Tensor, into_m: Tensor, source: Tensor, from_m: Tensor, g_m: Tensor, scale: float = 1.0
    ) -> None:
        """Adds ``scale · g · source[from]`` to the rows ``into``, for a bounded number of targets at a time."""
        for start in range(0, len(g_m), self._max_targets):
            part = slice(start, start + self._max_targets)
            sums.index_add_(0, into_m[part], source[from_m[part]] * g_m[part, None], alpha=scale)

    def _read(
        self, logprobs_nV: Tensor, packed: PackedBatch, chunk: _Chunk, lp_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The chunk's targets and their logprobs, which also go into ``lp_P``."""
        targets_m = torch.from_numpy(packed.targets_P[chunk.targets])
        lp_m = logprobs_nV[chunk.row_of_target, targets_m]
        lp_P[torch.from_numpy(chunk.targets)] = lp_m
        return targets_m, lp_m
