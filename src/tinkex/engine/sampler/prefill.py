"""Prompts during prefill, and how they share the token budget of a pass.

A pass computes a bounded number of prompt tokens, so long prompts do not delay decoding between two passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.engine.sampler.prompt_scores import PromptScores

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from tinkex.engine.model.lora import Adapter
    from tinkex.engine.sampler.kv_cache import PromptKV
    from tinkex.engine.sampler.prompt_cache import CachedPrompt, PromptCache, PromptMatch
    from tinkex.engine.sampler.request import Continuation, RunningRequest

__all__ = ["Prefill", "split_token_budget"]


@dataclass(eq=False)
class Prefill:
    """Tokens to prefill, and the sequences that continue them.

    These are the prompt of a new request with all its sequences, or the prompt and output so far of one preempted
    sequence.
    """

    request: RunningRequest
    tokens_P: npt.NDArray[np.int32]
    continuations: list[Continuation]
    scores: PromptScores | None = None
    """The prompt logprobs that the request asks for; None for a preempted sequence."""
    prompt: CachedPrompt | None = None

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: arrival order, the oldest first."""
        return self.continuations[0].age

    @property
    def adapter(self) -> Adapter | None:
        """The adapter under which the tokens are computed."""
        return self.request.job.adapter

    @property
    def owner(self) -> str:
        """The user of the request."""
        return self.request.job.owner

    @property
    def needs_slot(self) -> bool:
        """Whether any sequence decodes further after its next token."""
        return any(new.limit > len(new.tokens) + 1 for new in self.continuations)

    @property
    def unstarted(self) -> list[Continuation]:
        """The sequences whose next token has not been drawn: all, or the remaining ones after memory ran out."""
        so_far = len(self.tokens_P) - len(self.request.job.prompt_P)
        return [new for new in self.continuations if len(new.tokens) == so_far]

    @property
    def cached(self) -> CachedPrompt:
        """The cached prompt; allocated at admission."""
        assert self.prompt is not None
        return self.prompt

    @property
    def kv(self) -> PromptKV:
        """The prompt's keys and values."""
        return self.cached.kv

    @property
    def reusable(self) -> int:
        """How many of the first tokens can be copied from another prompt: up to the first row whose logits are needed."""
        last = len(self.tokens_P) - 1
        return last if self.scores is None else min(last, self.scores.first_row)

    def match_in(self, prompts: PromptCache) -> PromptMatch:
        """The prompt that it has most in common with: more can be copied from one that has the scores it needs."""
        can_reuse = None if self.scores is None else self.scores.can_reuse
        return prompts.match(self.adapter, self.tokens_P, self.reusable, self.owner, can_reuse=can_reuse)

    def start_scores(self, prompt: CachedPrompt, match: PromptMatch) -> None:
        """Takes the scores that the source of a new prompt has, and leaves its own for others."""
        if self.scores is not None:
            known = None if match.source is None else match.source.scores
            if known is not None and self.scores.can_reuse(known):
                self.scores.reuse(known, match.available + 1)
            prompt.scores = self.scores.known

    @property
    def filled(self) -> int:
        """How many tokens are computed."""
        return self.kv.filled

    @property
    def remaining(self) -> int:
        """How many tokens are not yet computed."""
        return len(self.tokens_P) - self.filled


def split_token_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """How many tokens of each prompt go into a pass of ``budget`` tokens; ``remaining`` has the oldest prompt first.

    Half of the budget goes to the oldest prompts, so that each completes in turn; half to those closest to completion,
    so that a short prompt does not wait behind a long one.

    Example:
        >>> split_token_budget([8000, 40, 500], 512)
        [256, 40, 216]
    """
    counts = [0] * len(remaining)

    def give(order: Sequence[int], tokens: int) -> None:
        for index in order:
            taken = min(tokens, remaining[index] - counts[index])
            counts[index] += taken
            tokens -= taken

    oldest_first = range(len(remaining))
    give(oldest_first, (budget + 1) // 2)
    give(sorted(oldest_first, key=lambda index: remaining[index] - counts[index]), budget - sum(counts))
    return counts
