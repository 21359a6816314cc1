"""Prompt logprobs of a request: of the prompt's tokens, top-k tokens, target tokens and drawn alternatives.

The hidden state of prompt token i predicts token i+1. The scores are collected during prefill, a few rows of logits at a
time, so the logits of a whole prompt never exist together. Every logprob is at temperature 1; alternatives are drawn at
the request's temperature.

Shapes: P prompt length, R rows of logits, V vocabulary, k tokens per row, C cells of the targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.sampler.job import SKIPPED_TARGET, SampleJob
from tinkex.engine.sampler.logits import draw_many, prompt_rng
from tinkex.types import PromptAltTokens, TensorData, TopkLogprobs
from tinkex.types.sampling import EMPTY_LOGPROB

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["KnownScores", "PromptScores", "empty_topk"]

MAX_KEPT_TOPK = 64
"""Longer tables of top-k tokens are not kept with a cached prompt; one of 64 takes 512 bytes per token."""


@dataclass(frozen=True)
class KnownScores:
    """The scores of all tokens of a prompt, as far as they are computed, for others that begin with the same tokens."""

    logprobs_P: npt.NDArray[np.float32] | None
    topk: TopkLogprobs | None


def empty_topk(length: int, k: int) -> TopkLogprobs:
    """An empty table of top-k tokens."""
    return TopkLogprobs(np.zeros((length, k), np.int32), np.full((length, k), EMPTY_LOGPROB, np.float32))


class PromptScores:
    """Collects the scores of one prompt, row by row.

    ``prompt_logprobs_last_n`` limits the prompt's own logprobs and the top-k tokens, not targets and alternatives.

    Example:
        >>> scores = PromptScores(job)
        >>> scores.add(scores.first_row, logits_RV)  # rows first_row, first_row + 1, …
        >>> scores.prompt_logprobs_P
    """

    def __init__(self, job: SampleJob) -> None:
        length = len(job.prompt_P)
        self._prompt_P = torch.from_numpy(job.prompt_P.astype(np.int64))
        self.prompt_logprobs_P: npt.NDArray[np.float32] | None = None
        self._topk_shape = (length, job.topk_prompt_logprobs)
        self._targets = None if job.target_prompt_logprobs is None else _Targets(job.target_prompt_logprobs)
        self._alternatives = _Alternatives(job) if job.prompt_alt_tokens_k else None
        self.first_row = length
        """The first row whose logits are needed; the prompt's length if none are."""
        shown = length if job.prompt_logprobs_last_n is None else job.prompt_logprobs_last_n
        self._first_shown_row = max(0, length - shown - 1)
        if job.prompt_logprobs:
            self.prompt_logprobs_P = np.full(length, np.nan, np.float32)
            self.first_row = self._first_shown_row
        if job.topk_prompt_logprobs:
            self.first_row = self._first_shown_row
        if self._targets is not None:
            self.first_row = min(self.first_row, self._targets.first_row)
        if self._alternatives is not None:
            self.first_row = 0
        self._depends_on_prompt_only = self._targets is None and self._alternatives is None
        self.end_row = length - 1
        """The row after the last one that is needed: the prompt's last token predicts no prompt token."""

    def can_reuse(self, known: KnownScores | None) -> bool:
        """Whether the scores of another prompt replace the rows that have them: it has all that this one needs."""
        k = self._topk_shape[1]
        return (
            known is not None
            and self._depends_on_prompt_only
            and (self.prompt_logprobs_P is not None or k > 0)
            and (self.prompt_logprobs_P is None or known.logprobs_P is not None)
            and (k == 0 or (known.topk is not None and known.topk.token_ids.shape[1] >= k))
        )

    def reuse(self, known: KnownScores, length: int) -> None:
        """Takes the scores of the first ``length`` tokens from a prompt that begins with the same ones."""
        shown = slice(self._first_shown_row + 1, length)
        if self.prompt_logprobs_P is not None and known.logprobs_P is not None:
            self.prompt_logprobs_P[shown] = known.logprobs_P[shown]
        if self.topk is not None and known.topk is not None:
            k = self._topk_shape[1]
            self.topk.token_ids[shown] = known.topk.token_ids[shown, :k]
            self.topk.logprobs[shown] = known.topk.logprobs[shown, :k]

    @property
    def known(self) -> KnownScores | None:
        """The prompt's own scores, filled while rows are added; None if not all of them are requested."""
        if self._first_shown_row > 0:
            return None
        return KnownScores(
            self.prompt_logprobs_P, self.topk if self._topk_shape[1] <= MAX_KEPT_TOPK else None
        )

    def rows_needed(self, start: int, end: int) -> range:
        """The rows of ``start…end`` (end excluded) whose logits are needed."""
        return range(max(start, self.first_row), min(end, self.end_row))

    def add(self, first_row: int, logits_RV: Tensor) -> None:
        """Adds the logits of consecutive rows; adding the same rows again changes nothing."""
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        rows = slice(first_row, first_row + len(logits_RV))
        if self._targets is not None:
            self._targets.add(rows, logprobs_RV)
        if self._alternatives is not None:
            self._alternatives.add(rows, logits_RV, logprobs_RV)
        hidden_rows = max(0, self._first_shown_row - first_row)
        shown_RV = logprobs_RV[hidden_rows:]
        predicted = slice(rows.start + hidden_rows + 1, rows.stop + 1)
        if not len(shown_RV):
            return
        if self.prompt_logprobs_P is not None:
            self.prompt_logprobs_P[predicted] = shown_RV.gather(1, self._prompt_P[predicted, None])[
                :, 0
            ].numpy()
        if self.topk is not None:
            best = shown_RV.topk(self.topk.token_ids.shape[1])
            self.topk.token_ids[predicted] = best.indices.numpy()
            self.topk.logprobs[predicted] = best.values.numpy()

    @cached_property
    def topk(self) -> TopkLogprobs | None:
        """The top-k tokens at every position; allocated at first use, not while a prompt waits."""
        return empty_topk(*self._topk_shape) if self._topk_shape[1] else None

    @property
    def target_logprobs(self) -> TensorData | None:
        """The logprob of every target, in the shape and layout of the targets; 0 where the target was skipped."""
        return None if self._targets is None else self._targets.result

    @property
    def alternatives(self) -> PromptAltTokens | None:
        """Tokens drawn for every prompt position after the first, (P-1, k), and their logprobs."""
        return None if self._alternatives is None else self._alternatives.result


class _Targets:
    """The target tokens of a request, dense or CSR, as one flat list of cells in the order of their rows."""

    def __init__(self, targets: TensorData) -> None:
        assert targets.shape is not None  # checked with the job
        self._targets = targets
        num_rows, width = targets.shape
        ends = (
            np.arange(num_rows + 1, dtype=np.int64) * width
            if targets.sparse_crow_indices is None
            else np.array(targets.sparse_crow_indices, np.int64)
        )
        self._tokens_C: npt.NDArray[np.int64] = targets.array
        self._rows_C = np.repeat(np.arange(num_rows), np.diff(ends))
        self._logprobs_C = np.zeros(len(self._tokens_C), np.float32)
        named = np.flatnonzero(self._tokens_C != SKIPPED_TARGET)
        self.first_row = int(self._rows_C[named[0]]) if len(named) else num_rows + 1

    def add(self, rows: slice, logprobs_RV: Tensor) -> None:
        start, stop = np.searchsorted(self._rows_C, [rows.start, rows.stop])
        tokens = self._tokens_C[start:stop]
        picked = logprobs_RV[
            torch.from_numpy(self._rows_C[start:stop] - rows.start), torch.from_numpy(tokens.clip(min=0))
        ].numpy()
        self._logprobs_C[start:stop] = np.where(tokens == SKIPPED_TARGET, 0.0, picked)

    @property
    def result(self) -> TensorData:
        return TensorData(
            self._logprobs_C,
            "float32",
            self._targets.shape,
            self._targets.sparse_crow_indices,
            self._targets.sparse_col_indices,
        )


class _Alternatives:
    """Independent draws from the model's distribution at every prompt position after the first.

    The random numbers are fixed at the start, so a prompt draws the same in any split into chunks, and if it is preempted.
    """

    def __init__(self, job: SampleJob) -> None:
        shape = (len(job.prompt_P) - 1, job.prompt_alt_tokens_k)
        self._temperature = job.params.temperature
        self._uniforms_Pk = torch.from_numpy(prompt_rng(job.params.seed).random(shape))
        self._tokens_Pk = np.zeros(shape, np.int64)
        self._logprobs_Pk = np.full(shape, np.nan, np.float32)

    def add(self, rows: slice, logits_RV: Tensor, logprobs_RV: Tensor) -> None:
        tokens_Rk = draw_many(logits_RV, self._temperature, self._uniforms_Pk[rows])
        self._tokens_Pk[rows] = tokens_Rk.numpy()
        self._logprobs_Pk[rows] = logprobs_RV.gather(1, tokens_Rk).numpy()

    @property
    def result(self) -> PromptAltTokens:
        return PromptAltTokens(
            TensorData.from_numpy(self._tokens_Pk), TensorData.from_numpy(self._logprobs_Pk)
        )
