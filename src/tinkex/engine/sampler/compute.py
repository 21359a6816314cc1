"""What computes the sampler's passes: the compiled core where there is one, else torch.

Both give the same numbers up to fp32 rounding. The core is also batch-invariant: its numbers do not depend, to the last
bit, on the other rows of a pass, or on how a prompt was split into passes.

Shapes: B rows of a decode step, T packed rows of a prefill pass, R any rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from tinkex.engine.kernels import CoreUnavailable, load_core
from tinkex.engine.model.lora import LoraRows
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.sampler.compiled import CompiledCompute
from tinkex.engine.sampler.kv_cache import Slot, SlotTable, prefill_attend
from tinkex.engine.sampler.logits import draw
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from tinkex.engine.model.lora import Adapter
    from tinkex.engine.sampler.compiled import CompiledDraw
    from tinkex.engine.sampler.decode_cache import DecodeCache, DecodeSlot
    from tinkex.engine.sampler.kv_cache import PromptKV
    from tinkex.engine.sampler.logits import Draw, RowSettings

__all__ = ["Compute", "Drawn", "Segments", "TorchCompute", "choose_compute", "warn_without_core"]

logger = logging.getLogger(__name__)

Drawn: TypeAlias = "Draw | CompiledDraw"

Segments: TypeAlias = "Sequence[tuple[Adapter | None, int]]"
"""The adapters of the rows of a pass, with the number of rows of each; rows of one adapter are consecutive."""


class Compute(Protocol):
    """The passes that the sampler runs.

    A pass appends keys and values after those that a prompt or slot holds. The sampler updates the lengths once the
    pass is done, so a pass that fails can be repeated.
    """

    @property
    def description(self) -> str:
        """What computes, for people: ``compiled (avx2)``, or ``torch`` and why."""
        ...

    @property
    def core_error(self) -> str | None:
        """Why the compiled core, which was wanted, is not used; None where it is, or was not wanted."""
        ...

    def new_decode_cache(self) -> DecodeCache:
        """An empty KV cache for decoding sequences, of the kind that ``decode`` takes."""
        ...

    def prefill(
        self, tokens_T: npt.NDArray[np.int32], pieces: Sequence[tuple[PromptKV, int]], segments: Segments
    ) -> Tensor:
        """Hidden states of the next tokens of several prompts, (T, D)."""
        ...

    def decode(
        self, tokens: Sequence[int], cache: DecodeCache, slots: Sequence[DecodeSlot], segments: Segments
    ) -> Tensor:
        """Hidden states of one new token for each slot of the cache, (B, D)."""
        ...

    def logits(self, hidden_RD: Tensor, segments: Segments) -> Tensor:
        """Logits of rows that are grouped by adapter, (R, V)."""
        ...

    def draw(self, logits_BV: Tensor, settings: Sequence[RowSettings], uniforms: Sequence[float]) -> Drawn:
        """Draws one token per row."""
        ...


class TorchCompute:
    """Computes with torch, on every machine."""

    def __init__(self, model: Transformer, reason: str, *, core_error: str | None = None) -> None:
        self._model = model
        self.description = f"torch ({reason})"
        self.core_error = core_error

    def new_decode_cache(self) -> SlotTable:
        """An empty table of slots."""
        return SlotTable(self._model.arch, self._model.dtype)

    def prefill(
        self, tokens_T: npt.NDArray[np.int32], pieces: Sequence[tuple[PromptKV, int]], segments: Segments
    ) -> Tensor:
        """Hidden states of the next tokens of several prompts, (T, D)."""
        return self._model.hidden(
            torch.from_numpy(tokens_T).long(),
            torch.cat([torch.arange(kv.filled, kv.filled + count) for kv, count in pieces]),
            prefill_attend(pieces, self._model.arch),
            _lora_rows(segments),
        )

    def decode(
        self, tokens: Sequence[int], cache: DecodeCache, slots: Sequence[DecodeSlot], segments: Segments
    ) -> Tensor:
        """Hidden states of one new token for each slot of the cache, (B, D)."""
        assert isinstance(cache, SlotTable)
        return self._model.hidden(
            torch.tensor(tokens),
            torch.tensor([slot.length for slot in slots]),
            cache.attend([slot for slot in slots if isinstance(slot, Slot)]),
            _lora_rows(segments),
        )

    def logits(self, hidden_RD: Tensor, segments: Segments) -> Tensor:
        """Logits of rows that are grouped by adapter, (R, V)."""
        return self._model.logits(hidden_RD, _lora_rows(segments))

    def draw(self, logits_BV: Tensor, settings: Sequence[RowSettings], uniforms: Sequence[float]) -> Drawn:
        """Draws one token per row."""
        return draw(logits_BV, settings, uniforms)


def choose_compute(model: Transformer, compute: str = "auto") -> Compute:
    """The compiled core or torch, as ``compute`` says; ``"auto"`` takes the core if it can compute this model.

    Example:
        >>> choose_compute(model, "torch").description
        'torch (as set)'
    """
    if compute == "torch":
        return TorchCompute(model, "as set")
    if compute not in {"auto", "compiled"}:
        raise SetupError(f"sampler_compute {compute!r} does not exist; choose 'auto', 'compiled' or 'torch'")
    reason, core_error = _unsupported(model), None
    if reason is None:
        try:
            return CompiledCompute(model, load_core())
        except CoreUnavailable as error:
            reason = core_error = str(error)
    if compute == "compiled":
        raise SetupError(f"the compiled core cannot be used: {reason}. Or set sampler_compute to 'auto'.")
    return TorchCompute(model, reason, core_error=core_error)


@cache
def warn_without_core(reason: str) -> None:
    """Logs, once per process and reason, that samples are computed without the compiled core, and what that costs."""
    # Measured with the default model, one thread, 1 to 32 sequences at a time: 1.7 to 2.5 times as long.
    logger.warning("sampling runs on torch, at about half the speed of the compiled core: %s", reason)


def _unsupported(model: Transformer) -> str | None:
    """Why the core cannot compute this model; None if it can."""
    if type(model) is not Transformer:
        return f"{type(model).__name__} has its own forward pass"
    if model.dtype != torch.float32 or model.embedding_VD.device.type != "cpu":
        return f"the core computes float32 on the CPU; this model is {model.dtype} on {model.embedding_VD.device}"
    return None


def _lora_rows(segments: Segments) -> LoraRows | None:
    """Consecutive segments of one adapter merged; None if no row has an adapter."""
    groups = [list(same) for _, same in groupby(segments, key=lambda segment: id(segment[0]))]
    merged = [(group[0][0], sum(count for _, count in group)) for group in groups]
    return None if all(adapter is None for adapter, _ in merged) else LoraRows(merged)
