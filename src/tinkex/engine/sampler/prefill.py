"""Prompts on their way into memory, and how they share one pass.

A pass takes a bounded number of prompt tokens, so decoding goes on between two passes however long a prompt is.
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
    from tinkex.engine.sampler.prompt_cache import CachedPrompt
    from tinkex.engine.sampler.request import Continuation, Request

__all__ = ["Prefill", "share_chunk"]


@dataclass(eq=False)
class Prefill:
    """Tokens to bring into memory, and the sequences that go on from there.

    These are the prompt of a new request with all its sequences, or the prompt and output so far of one
    sequence that had to give its memory to others.
    """

    request: Request
    tokens_P: npt.NDArray[np.int32]
    continuations: list[Continuation]
    scores: PromptScores | None = None
    """What the request asks about its prompt; None for a sequence that comes back."""
    prompt: CachedPrompt | None = None

    @property
    def age(self) -> tuple[int, int]:
        """Sorts by arrival, the oldest first."""
        return self.continuations[0].age

    @property
    def adapter(self) -> Adapter | None:
        """The adapter the tokens are seen through."""
        return self.request.job.adapter

    @property
    def owner(self) -> str:
        """Whose tokens they are."""
        return self.request.job.owner

    @property
    def needs_slot(self) -> bool:
        """Whether any sequence goes on after the first token that is drawn here."""
        return any(new.limit > len(new.tokens) + 1 for new in self.continuations)

    @property
    def not_begun(self) -> list[Continuation]:
        """The sequences whose next token after these has not been drawn: all, or the rest after memory ran out."""
        so_far = len(self.tokens_P) - len(self.request.job.prompt_P)
        return [new for new in self.continuations if len(new.tokens) == so_far]

    @property
    def cached(self) -> CachedPrompt:
        """The prompt's place in memory; it has one from admission on."""
        assert self.prompt is not None
        return self.prompt

    @property
    def kv(self) -> PromptKV:
        """The prompt's keys and values."""
        return self.cached.kv

    @property
    def reusable(self) -> int:
        """How many of the first tokens another prompt can lend: up to the first row whose logits are needed."""
        last = len(self.tokens_P) - 1
        return last if self.scores is None else min(last, self.scores.first_row)

    @property
    def filled(self) -> int:
        """How many tokens are in memory."""
        return self.kv.filled

    @property
    def remaining(self) -> int:
        """How many tokens are not yet in memory."""
        return len(self.tokens_P) - self.filled


def share_chunk(remaining: Sequence[int], budget: int) -> list[int]:
    """How many tokens of each waiting prompt go into a pass of ``budget`` tokens; oldest prompt first.

    Half goes to the oldest prompts, so each gets done in its turn; half to those closest to their end, so a
    short prompt does not wait behind a long one.

    Example:
        >>> share_chunk([8000, 40, 500], 512)
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
