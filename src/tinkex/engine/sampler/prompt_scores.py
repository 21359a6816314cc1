"""What a request asked about its prompt: logprobs, likeliest tokens and chosen targets, all at temperature 1.

The hidden state of prompt token i predicts token i+1. The scores are collected while the prompt is prefilled,
a few rows of logits at a time, so the logits of a whole prompt never exist at once.

Shapes: P prompt length, R rows of logits at hand, V vocabulary, k likeliest tokens, N targets per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.sampler.job import SKIPPED_TARGET, SampleJob
from tinkex.types import TensorData, TopkLogprobs
from tinkex.types.sampling import EMPTY_LOGPROB

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["PromptScores", "empty_topk"]


def empty_topk(length: int, k: int) -> TopkLogprobs:
    """A table of likeliest tokens with nothing in it yet."""
    return TopkLogprobs(np.zeros((length, k), np.int32), np.full((length, k), EMPTY_LOGPROB, np.float32))


class PromptScores:
    """Collects the scores of one prompt, row by row.

    ``prompt_logprobs_last_n`` limits the prompt's own logprobs only; top-k and targets cover what they name.

    Example:
        >>> scores = PromptScores(job)
        >>> scores.add(scores.first_row, logits_RV)  # rows first_row, first_row + 1, …
        >>> scores.prompt_logprobs_P
    """

    def __init__(self, job: SampleJob) -> None:
        length = len(job.prompt_P)
        self._prompt_P = torch.from_numpy(job.prompt_P.astype(np.int64))
        self._targets_PN: npt.NDArray[np.int64] | None = None
        self._target_logprobs_PN: npt.NDArray[np.float32] | None = None
        self.prompt_logprobs_P: npt.NDArray[np.float32] | None = None
        self.topk: TopkLogprobs | None = None
        self.first_row = length
        """The first row whose logits are needed; the prompt's length if none is."""
        if job.prompt_logprobs:
            self.prompt_logprobs_P = np.full(length, np.nan, np.float32)
            shown = length if job.prompt_logprobs_last_n is None else job.prompt_logprobs_last_n
            self.first_row = max(0, length - shown - 1)
        self._first_logprob_row = self.first_row
        if job.topk_prompt_logprobs:
            self.topk = empty_topk(length, job.topk_prompt_logprobs)
            self.first_row = 0
        if job.target_prompt_logprobs is not None:
            self._targets_PN = job.target_prompt_logprobs.to_numpy(pad_value=SKIPPED_TARGET)
            self._target_logprobs_PN = np.full(self._targets_PN.shape, np.nan, np.float32)
            asked = np.flatnonzero((self._targets_PN != SKIPPED_TARGET).any(axis=1))
            if len(asked):
                self.first_row = min(self.first_row, int(asked[0]))
        self.end_row = length - 1
        """The row after the last one that is needed: the prompt's last token predicts nothing in the prompt."""

    def rows_needed(self, start: int, end: int) -> range:
        """Those of the rows ``start…end`` (end excluded) whose logits are needed."""
        return range(max(start, self.first_row), min(end, self.end_row))

    def add(self, first_row: int, logits_RV: Tensor) -> None:
        """Takes the logits of consecutive rows."""
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        rows = slice(first_row, first_row + len(logits_RV))
        predicted = slice(rows.start + 1, rows.stop + 1)
        if self.prompt_logprobs_P is not None:
            own_R = logprobs_RV.gather(1, self._prompt_P[predicted, None])[:, 0].numpy()
            skip = max(0, self._first_logprob_row - first_row)
            self.prompt_logprobs_P[predicted][skip:] = own_R[skip:]
        if self.topk is not None:
            best = logprobs_RV.topk(self.topk.token_ids.shape[1])
            self.topk.token_ids[predicted] = best.indices.numpy()
            self.topk.logprobs[predicted] = best.values.numpy()
        if self._targets_PN is not None and self._target_logprobs_PN is not None:
            targets_RN = self._targets_PN[rows]
            picked_RN = logprobs_RV.gather(1, torch.from_numpy(targets_RN.clip(min=0))).numpy()
            self._target_logprobs_PN[rows] = np.where(targets_RN == SKIPPED_TARGET, np.nan, picked_RN)

    @property
    def target_logprobs(self) -> TensorData | None:
        """The logprob of every target, (P-1, N); NaN where the target was skipped."""
        return None if self._target_logprobs_PN is None else TensorData.from_numpy(self._target_logprobs_PN)
