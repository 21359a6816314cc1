"""What one sampler can take, worked out without weights and without torch: admission asks here, and so does the sampler."""

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

__all__ = ["SLOT_STEP", "SamplerLimits", "SlotSizes"]

SLOT_STEP = 64
"""Tokens of a block, the smallest capacity of a slot side by side, and the chunk in which the core adds up."""


@dataclass(frozen=True)
class SlotSizes:
    """How much memory decoding sequences take; ``apart`` says that they have blocks instead of slots side by side.

    Example:
        >>> SlotSizes(apart=False).capacity(100), SlotSizes(apart=True).capacity(100)
        (128, 128)
    """

    apart: bool

    def capacity(self, length: int) -> int:
        """How many tokens a sequence has room for that holds ``length`` tokens and takes one more."""
        if self.apart:
            return (length // SLOT_STEP + 1) * SLOT_STEP
        return max(SLOT_STEP, 1 << length.bit_length())

    def own_length(self, prompt_length: int) -> int:
        """How many tokens of a prompt are copied for a sequence that goes on from it; the others stay where they are.

        The last, unfinished block is copied: new tokens belong to it.
        """
        return prompt_length % SLOT_STEP if self.apart else prompt_length

    def most_tokens(self, prompt_length: int, num_new: int) -> int:
        """The most tokens one sequence alone ever has memory for at once, if it gets ``num_new`` new tokens.

        Those are the prompt, and what comes after it in blocks or in a slot. The prompt may be longer than the
        request's: a sequence that gave way comes back with what it had as its prompt, all but the last two tokens of it
        at most. With blocks only the tokens of that prompt's last, unfinished one exist twice.
        """
        if num_new == 1:
            return prompt_length  # its only token is drawn without a slot
        held = prompt_length + num_new - 2
        if not self.apart:
            return held + self.capacity(held)
        unfinished = prompt_length % SLOT_STEP + num_new - 2
        return self.capacity(held) + min(unfinished, SLOT_STEP - 1)


@dataclass(frozen=True)
class SamplerLimits:
    """What the jobs of one sampler may ask for: the model's vocabulary and context, and the memory there is.

    Example:
        >>> sampler.limits.check(SampleJob("req-1", None, prompt_P, 1, SamplingParams(max_tokens=16), ["seq-1"]))
    """

    arch: Architecture
    eos_token_ids: Sequence[int]
    kv_budget_bytes: int
    budget_tokens: int
    """How many tokens' keys and values fit into the budget."""
    sizes: SlotSizes

    def check(self, job: SampleJob) -> tuple[StopRule, int]:
        """What stops the job, and the most new tokens there can ever be memory for; ``InvalidInput`` if it cannot be run."""
        return check_job(job, self.arch, self.eos_token_ids), self._most_new(job)

    def _most_new(self, job: SampleJob) -> int:
        length = len(job.prompt_P)
        fits = bisect_right(
            range(1, self.arch.max_context + 1),
            self.budget_tokens,
            key=lambda num_new: self.sizes.most_tokens(length, num_new),
        )
        held = f"the sampler's memory of {self.kv_budget_bytes:,} bytes holds {self.budget_tokens:,} tokens"
        if not fits:
            raise InvalidInput(
                f"prompt has {length:,} tokens, and {held}; shorten the prompt, or give the engine a larger kv_cache_bytes"
            )
        wanted = job.params.max_tokens
        if wanted is not None and max_new_tokens(length, wanted, self.arch.max_context) > fits:
            raise InvalidInput(
                f"max_tokens is {wanted:,}, and {held}, room for {fits:,} new tokens after this prompt of {length:,}; "
                "ask for fewer, leave max_tokens out for as many as fit, or give the engine a larger kv_cache_bytes"
            )
        return fits
