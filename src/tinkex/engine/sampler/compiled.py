"""The sampler's passes by the compiled core, on torch's memory; torch computes nothing.

Keys, values, most adapters and weights that need all bits of fp32 are read from torch's memory. Other weights have a
packed copy, of a sixth to a half of their bytes, that gives the same numbers.

Shapes: B rows of a decode step, T packed rows of a prefill pass, R any rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from tinkex.engine.kernels.layout import (
    PROJECTIONS,
    DrawC,
    ExtentC,
    HeadC,
    LayerC,
    MatrixC,
    ModelC,
    PassC,
    SegmentC,
    SequenceC,
)
from tinkex.engine.sampler.adapter_tables import adapter_tables
from tinkex.engine.sampler.block_table import BlockSlot, BlockTable
from tinkex.engine.sampler.limits import BLOCK_TOKENS
from tinkex.engine.sampler.logits import without_improbable
from tinkex.engine.sampler.packed_weights import layer_biases, packed_weights, plain_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from ctypes import Array

    import numpy.typing as npt
    from torch import Tensor

    from tinkex.engine.kernels import Core
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.model.lora import Adapter
    from tinkex.engine.model.transformer import LayerWeights, Transformer
    from tinkex.engine.sampler.adapter_tables import AdapterTables
    from tinkex.engine.sampler.decode_cache import DecodeCache, DecodeSlot
    from tinkex.engine.sampler.kv_cache import PromptKV
    from tinkex.engine.sampler.logits import RowSettings
    from tinkex.engine.sampler.packed_weights import StoredMatrix

__all__ = ["CompiledCompute", "CompiledDraw"]

_Segments: TypeAlias = "Sequence[tuple[Adapter | None, int]]"


class CompiledCompute:
    """Computes with the core, on as many threads as torch is configured to use.

    Example:
        >>> CompiledCompute(model, load_core()).description
        'compiled (avx2)'
    """

    def __init__(
        self, model: Transformer, core: Core, *, pack: bool = True, tables: AdapterTables | None = None
    ) -> None:
        self._core = core
        self._weights = model  # keeps alive the memory that the core reads
        self._matrices = packed_weights(model, core) if pack else plain_weights(model)
        self._vocab_size = model.arch.vocab_size
        self._hidden_size = model.arch.hidden_size
        self._layers = (LayerC * len(model.layers))(
            *(
                _layer(matrices, weights, model.arch, layer)
                for layer, (matrices, weights) in enumerate(
                    zip(self._matrices.layers, model.layers, strict=True)
                )
            )
        )
        self._model = _model(model, self._layers, self._matrices.unembedding)
        self._adapters = adapter_tables(model, core) if tables is None else tables
        self.description = f"compiled ({core.variant})"
        self.core_error = None

    def new_decode_cache(self) -> BlockTable:
        """An empty table of blocks."""
        return BlockTable(self._weights.arch, self._weights.dtype)

    def prefill(
        self, tokens_T: npt.NDArray[np.int32], pieces: Sequence[tuple[PromptKV, int]], segments: _Segments
    ) -> Tensor:
        """Hidden states of the next tokens of several prompts, (T, D)."""
        sequences = (SequenceC * len(pieces))()
        first_row = 0
        for sequence, (kv, count) in zip(sequences, pieces, strict=True):
            sequence.first_row, sequence.num_rows, sequence.position = first_row, count, kv.filled
            sequence.extents, sequence.num_extents = (ExtentC * 1)(_extent(kv.kv_L2KPd, 0)), 1
            first_row += count
        positions = [np.arange(kv.filled, kv.filled + count) for kv, count in pieces]
        return self._forward(tokens_T, np.concatenate(positions), sequences, segments)

    def decode(
        self, tokens: Sequence[int], cache: DecodeCache, slots: Sequence[DecodeSlot], segments: _Segments
    ) -> Tensor:
        """Hidden states of one new token for each slot of the cache, (B, D)."""
        assert len(slots) == len(cache)
        sequences = (SequenceC * len(slots))()
        for row, (sequence, slot) in enumerate(zip(sequences, slots, strict=True)):
            assert isinstance(slot, BlockSlot)
            if slot.extents is None:
                slot.extents = _extents(slot)
            sequence.first_row, sequence.num_rows, sequence.position = row, 1, slot.length
            sequence.extents, sequence.num_extents = slot.extents, len(slot.extents)
        positions_B = np.array([slot.length for slot in slots])
        return self._forward(np.array(tokens, np.int32), positions_B, sequences, segments)

    def logits(self, hidden_RD: Tensor, segments: _Segments) -> Tensor:
        """Logits of rows that are grouped by adapter, (R, V)."""
        hidden_RD = hidden_RD.contiguous()
        logits_RV = torch.empty(len(hidden_RD), self._vocab_size)
        shared, keep = self._segments(segments)
        rows = HeadC(len(hidden_RD), len(shared), hidden_RD.data_ptr(), shared, logits_RV.data_ptr())
        self._core.head(self._model, rows, torch.get_num_threads())
        del keep
        return logits_RV

    def draw(
        self, logits_BV: Tensor, settings: Sequence[RowSettings], uniforms: Sequence[float]
    ) -> CompiledDraw:
        """Draws one token per row."""
        drawn = self._draw(logits_BV, settings, uniforms)
        rows = [row for row, setting in enumerate(settings) if setting.min_p and not setting.greedy]
        if not rows:
            return drawn
        # The core truncates by top-k and top-p: rows with min-p are drawn again, from logits without improbable tokens.
        min_p_R = [settings[row].min_p for row in rows]
        masked_RV = drawn.masked_logits(rows, min_p_R)
        again = self._draw(masked_RV, [settings[row] for row in rows], [uniforms[row] for row in rows])
        return drawn.with_tokens(rows, again.tokens_B)

    def _draw(
        self, logits_BV: Tensor, settings: Sequence[RowSettings], uniforms: Sequence[float]
    ) -> CompiledDraw:
        num_rows = len(settings)
        temperatures_B = np.array([row.temperature for row in settings], np.float32)
        top_ks_B = np.array([row.top_k for row in settings], np.int64)
        top_ps_B = np.array([row.top_p for row in settings], np.float64)
        uniforms_B = np.array(uniforms, np.float64)
        tokens_B, logprobs_B = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
        log_normalizers_B = torch.empty(num_rows)
        rows = DrawC(
            num_rows,
            self._vocab_size,
            logits_BV.data_ptr(),
            _address(temperatures_B),
            _address(top_ks_B),
            _address(top_ps_B),
            _address(uniforms_B),
            tokens_B.data_ptr(),
            logprobs_B.data_ptr(),
            log_normalizers_B.data_ptr(),
        )
        self._core.draw(rows, torch.get_num_threads())
        return CompiledDraw(
            tokens_B,
            logprobs_B,
            torch.isfinite(log_normalizers_B),
            logits_BV,
            torch.from_numpy(temperatures_B),
            log_normalizers_B,
        )

    def _forward(
        self,
        tokens_T: npt.NDArray[np.int32],
        positions_T: npt.NDArray[np.int64],
        sequences: Array[SequenceC],
        segments: _Segments,
    ) -> Tensor:
        tokens_T = np.ascontiguousarray(tokens_T, np.int32)
        cos_T1h, sin_T1h = self._weights.rotary(torch.from_numpy(positions_T))
        cos_T1h, sin_T1h = cos_T1h.contiguous(), sin_T1h.contiguous()
        hidden_TD = torch.empty(len(tokens_T), self._hidden_size)
        shared, keep = self._segments(segments)
        rows = PassC(
            len(tokens_T),
            len(sequences),
            len(shared),
            _address(tokens_T),
            cos_T1h.data_ptr(),
            sin_T1h.data_ptr(),
            sequences,
            shared,
            hidden_TD.data_ptr(),
        )
        self._core.forward(self._model, rows, torch.get_num_threads())
        del keep
        return hidden_TD

    def _segments(self, segments: _Segments) -> tuple[Array[SegmentC], list[object]]:
        """Consecutive rows with the same adapter merged; empty if no row has one.

        The second result holds the memory that the segments point to; it must outlive the call of the core.
        """
        if all(adapter is None for adapter, _ in segments):
            return (SegmentC * 0)(), []
        merged: list[SegmentC] = []
        keep: list[object] = []
        first_row = 0
        for _, same in groupby(segments, key=lambda segment: id(segment[0])):
            group = list(same)
            adapter, num_rows = group[0][0], sum(count for _, count in group)
            if adapter is not None:
                table = self._adapters.get(adapter, num_rows)
                keep.append((adapter, table))
                rank, scale = adapter.layout.rank, adapter.spec.scale
                merged.append(SegmentC(first_row, num_rows, rank, scale, table.loras))
            first_row += num_rows
        return (SegmentC * len(merged))(*merged), keep


@dataclass(frozen=True, eq=False)
class CompiledDraw:
    """One token per row, and the distribution it is reported under."""

    tokens_B: Tensor
    logprobs_B: Tensor
    finite_B: Tensor
    """False where the logits contain NaN or +inf; the token of such a row is not valid."""
    _logits_BV: Tensor
    _temperatures_B: Tensor
    _log_normalizers_B: Tensor

    def distribution(self, rows: Sequence[int]) -> Tensor:
        """Logprobs of the temperature-scaled distributions of some rows, before min-p, top-k and top-p."""
        return self._scaled_logits(rows) - self._log_normalizers_B[torch.tensor(rows), None]

    def masked_logits(self, rows: Sequence[int], min_p_R: Sequence[float]) -> Tensor:
        """Logits of some rows, with -inf for the tokens that min-p excludes."""
        improbable_RV = without_improbable(self._scaled_logits(rows), min_p_R).isneginf()
        return self._logits_BV[torch.tensor(rows)].masked_fill(improbable_RV, -torch.inf)

    def with_tokens(self, rows: Sequence[int], tokens_R: Tensor) -> CompiledDraw:
        """The same with other tokens in some rows, under the same distributions."""
        picked = torch.tensor(rows)
        tokens_B, logprobs_B = self.tokens_B.clone(), self.logprobs_B.clone()
        tokens_B[picked] = tokens_R
        logprobs_B[picked] = self.distribution(rows).gather(1, tokens_R[:, None])[:, 0]
        return replace(self, tokens_B=tokens_B, logprobs_B=logprobs_B)

    def _scaled_logits(self, rows: Sequence[int]) -> Tensor:
        """Temperature-scaled logits below the highest one; at temperature 1 for greedy rows."""
        picked = torch.tensor(rows)
        temperatures_R1 = self._temperatures_B[picked, None]
        logits_RV = self._logits_BV[picked]
        below_max_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
        return below_max_RV / torch.where(temperatures_R1 == 0, 1.0, temperatures_R1)


def _extents(slot: BlockSlot) -> Array[ExtentC]:
    """The keys and values of a sequence: the shared prompt, then its own blocks."""
    extents = [] if slot.shared is None else [_extent(slot.shared.kv_L2KPd, 0)]
    for number, block_L2KCd in enumerate(slot.blocks_L2KCd):
        extents.append(_extent(block_L2KCd, slot.start + number * BLOCK_TOKENS))
    return (ExtentC * len(extents))(*extents)


def _extent(kv_L2KCd: Tensor, start: int) -> ExtentC:
    return ExtentC(kv_L2KCd.data_ptr(), start, *kv_L2KCd.stride()[:3])


def _layer(matrices: Sequence[StoredMatrix], weights: LayerWeights, arch: Architecture, layer: int) -> LayerC:
    return LayerC(
        (MatrixC * PROJECTIONS)(*(matrix.as_c for matrix in matrices)),
        (c_void_p * PROJECTIONS)(*(_pointer(bias) for bias in layer_biases(weights, arch))),
        _pointer(weights.input_norm_D),
        _pointer(weights.mlp_norm_D),
        _pointer(weights.q_norm_d),
        _pointer(weights.k_norm_d),
        arch.window(layer) or 0,
    )


def _model(model: Transformer, layers: Array[LayerC], unembedding: StoredMatrix) -> ModelC:
    arch = model.arch
    return ModelC(
        arch.num_layers,
        arch.hidden_size,
        arch.intermediate_size,
        arch.num_heads,
        arch.num_kv_heads,
        arch.head_dim,
        arch.vocab_size,
        arch.rms_norm_eps,
        _pointer(model.embedding_VD),
        _pointer(model.norm_D),
        unembedding.as_c,
        layers,
    )


def _pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor; NULL for None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "weights must be contiguous"
    return tensor.data_ptr()


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)
