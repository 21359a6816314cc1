"""Limits of a sampler, computed without weights and without torch, for admission and for the sampler itself."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.engine.sampler.job import SampleJob, check_job, max_new_tokens
from tinkex.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.sampler.stopping import StopRule

__all__ = ["BLOCK_TOKENS", "SamplerLimits", "SlotSizes"]

BLOCK_TOKENS = 64
"""Tokens of a block, the minimum capacity of a slot, and the chunk in which the core adds up."""


@dataclass(frozen=True)
class SlotSizes:
    """How much memory decoding sequences take, ``paged`` in blocks or in contiguous slots.

    Example:
        >>> SlotSizes(paged=False).capacity(100), SlotSizes(paged=True).capacity(100)
        (128, 128)
    """

    paged: bool

    def capacity(self, length: int) -> int:
        """How many tokens are allocated for a sequence that holds ``length`` tokens and needs room for one more."""
        if self.paged:
            return (length // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        return max(BLOCK_TOKENS, 1 << length.bit_length())

    def own_length(self, prompt_length: int) -> int:
        """How many tokens of a prompt are copied for a sequence that continues it; the others are shared.

        The last, partial block is copied: new tokens are added to it.
        """
        return prompt_length % BLOCK_TOKENS if self.paged else prompt_length

    def peak_tokens(self, prompt_length: int, num_new: int) -> int:
        """How many tokens are allocated at the peak for one sequence alone with ``num_new`` new tokens.

        Those are the prompt, and the tokens after it in blocks or in a slot. The prompt can be longer than the request's:
        a preempted sequence resumes with its output as part of its prompt, at most all but its last two tokens. With
        blocks, only the tokens of that prompt's last, partial block exist twice.
        """
        if num_new == 1:
            return prompt_length  # the only new token needs no slot
        held = prompt_length + num_new - 2
        if not self.paged:
            return held + self.capacity(held)
        partial = prompt_length % BLOCK_TOKENS + num_new - 2
        return self.capacity(held) + min(partial, BLOCK_TOKENS - 1)


@dataclass(frozen=True)
class SamplerLimits:
    """Limits of the jobs of one sampler: the model's vocabulary and context, and the memory for keys and values.

    Example:
        >>> sampler.limits.check(SampleJob("req-1", None, prompt_P, 1, SamplingParams(max_tokens=16), ["seq-1"]))
    """

    arch: Architecture
    eos_token_ids: Sequence[int]
    kv_budget_bytes: int
    budget_tokens: int
    """How many tokens fit into ``kv_budget_bytes``."""
    sizes: SlotSizes

    def check(self, job: SampleJob) -> tuple[StopRule, int]:
        """The stop rule of the job, and how many new tokens fit into memory; raises ``InvalidInput`` if it cannot run."""
        return check_job(job, self.arch, self.eos_token_ids), self._max_new_tokens(job)

    def _max_new_tokens(self, job: SampleJob) -> int:
        length = len(job.prompt_P)
        fits = bisect_right(
            range(1, self.arch.max_context + 1),
            self.budget_tokens,
            key=lambda num_new: self.sizes.peak_tokens(length, num_new),
        )
        capacity = (
            f"the sampler's KV cache of {self.kv_budget_bytes:,} bytes holds {self.budget_tokens:,} tokens"
        )
        if not fits:
            raise InvalidInput(
                f"prompt has {length:,} tokens, and {capacity}; shorten the prompt, or set a larger kv_cache_bytes"
            )
        wanted = job.params.max_tokens
        if wanted is not None and max_new_tokens(length, wanted, self.arch.max_context) > fits:
            raise InvalidInput(
                f"max_tokens is {wanted:,}, and {capacity}, room for {fits:,} new tokens after this prompt of {length:,}; "
                "request fewer, omit max_tokens for as many as fit, or set a larger kv_cache_bytes"
            )
        return fits
