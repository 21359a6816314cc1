"""How the sampler's numbers are computed: by the compiled core where there is one, else by torch.

Both give the same numbers up to fp32 rounding. The core's also do not depend, to the last bit, on what else is in a
pass, nor on how a prompt was cut into passes.

Shapes: B rows of a decode step, T packed rows of a prefill pass, R rows at hand, D hidden, V vocabulary.
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
    from tinkex.engine.sampler.kv_cache import PromptKV
    from tinkex.engine.sampler.logits import Draw, RowSettings
    from tinkex.engine.sampler.places import Place, Places

__all__ = ["Compute", "Drawn", "Segments", "TorchCompute", "choose_compute", "warn_without_core"]

logger = logging.getLogger(__name__)

Drawn: TypeAlias = "Draw | CompiledDraw"

Segments: TypeAlias = "Sequence[tuple[Adapter | None, int]]"
"""Which adapter the rows of a pass belong to, and how many of them; rows of one adapter are neighbours."""


class Compute(Protocol):
    """What the sampler needs computed.

    Keys and values are written behind what a prompt or slot holds already; the sampler counts them once the pass is
    done, so a pass that fails can be repeated.
    """

    @property
    def description(self) -> str:
        """What computes, for people: ``compiled (avx2)``, or ``torch`` and why."""
        ...

    @property
    def core_error(self) -> str | None:
        """Why the compiled core, which was wanted, is not used; None where it is, or was not wanted."""
        ...

    def places(self) -> Places:
        """Room for the sequences of decode steps, empty, of the kind this way wants."""
        ...

    def prefill(
        self, tokens_T: npt.NDArray[np.int32], pieces: Sequence[tuple[PromptKV, int]], segments: Segments
    ) -> Tensor:
        """Hidden states of the next rows of several prompts, (T, D)."""
        ...

    def decode(
        self, tokens: Sequence[int], table: Places, slots: Sequence[Place], segments: Segments
    ) -> Tensor:
        """Hidden states of one new row for each of the table's slots, (B, D)."""
        ...

    def logits(self, hidden_RD: Tensor, segments: Segments) -> Tensor:
        """Logits of rows that are grouped by adapter, (R, V)."""
        ...

    def draw(self, logits_BV: Tensor, settings: Sequence[RowSettings], uniforms: Sequence[float]) -> Drawn:
        """One token per row."""
        ...


class TorchCompute:
    """Computes with torch, on any machine."""

    def __init__(self, model: Transformer, reason: str, *, core_error: str | None = None) -> None:
        self._model = model
        self.description = f"torch ({reason})"
        self.core_error = core_error

    def places(self) -> SlotTable:
        """An empty table of slots side by side."""
        return SlotTable(self._model.arch, self._model.dtype)

    def prefill(
        self, tokens_T: npt.NDArray[np.int32], pieces: Sequence[tuple[PromptKV, int]], segments: Segments
    ) -> Tensor:
        """Hidden states of the next rows of several prompts, (T, D)."""
        return self._model.hidden(
            torch.from_numpy(tokens_T).long(),
            torch.cat([torch.arange(kv.filled, kv.filled + count) for kv, count in pieces]),
            prefill_attend(pieces, self._model.arch),
            _lora_rows(segments),
        )

    def decode(
        self, tokens: Sequence[int], table: Places, slots: Sequence[Place], segments: Segments
    ) -> Tensor:
        """Hidden states of one new row for each of the table's slots, (B, D)."""
        assert isinstance(table, SlotTable)
        return self._model.hidden(
            torch.tensor(tokens),
            torch.tensor([slot.length for slot in slots]),
            table.attend([slot for slot in slots if isinstance(slot, Slot)]),
            _lora_rows(segments),
        )

    def logits(self, hidden_RD: Tensor, segments: Segments) -> Tensor:
        """Logits of rows that are grouped by adapter, (R, V)."""
        return self._model.logits(hidden_RD, _lora_rows(segments))

    def draw(self, logits_BV: Tensor, settings: Sequence[RowSettings], uniforms: Sequence[float]) -> Drawn:
        """One token per row."""
        return draw(logits_BV, settings, uniforms)


def choose_compute(model: Transformer, way: str = "auto") -> Compute:
    """``"auto"`` takes the compiled core on this model if it can be used, else torch; else ``way`` names one of them.

    Example:
        >>> choose_compute(model, "torch").description
        'torch (as set)'
    """
    if way == "torch":
        return TorchCompute(model, "as set")
    if way not in {"auto", "compiled"}:
        raise SetupError(f"there is no way {way!r} to compute samples; choose 'auto', 'compiled' or 'torch'")
    reason, core_error = _unfit(model), None
    if reason is None:
        try:
            return CompiledCompute(model, load_core())
        except CoreUnavailable as error:
            reason = core_error = str(error)
    if way == "compiled":
        raise SetupError(f"the compiled core cannot be used: {reason}. Or let the engine choose.")
    return TorchCompute(model, reason, core_error=core_error)


@cache
def warn_without_core(reason: str) -> None:
    """Logs, once per process and reason, that samples are computed without the compiled core, and what that costs."""
    # Measured with the default model, one thread, 1 to 32 sequences at a time: 1.7 to 2.5 times as long.
    logger.warning("sampling runs on torch, at about half the speed of the compiled core: %s", reason)


def _unfit(model: Transformer) -> str | None:
    """Why the core cannot compute this model; None if it can."""
    if type(model) is not Transformer:
        return f"{type(model).__name__} computes in its own way"
    if model.dtype != torch.float32 or model.embedding_VD.device.type != "cpu":
        return f"the core computes float32 on the CPU, and this model is {model.dtype} on {model.embedding_VD.device}"
    return None


def _lora_rows(segments: Segments) -> LoraRows | None:
    """Neighbouring segments of one adapter joined; None if every row is the base model's."""
    groups = [list(same) for _, same in groupby(segments, key=lambda segment: id(segment[0]))]
    joined = [(group[0][0], sum(count for _, count in group)) for group in groups]
    return None if all(adapter is None for adapter, _ in joined) else LoraRows(joined)
