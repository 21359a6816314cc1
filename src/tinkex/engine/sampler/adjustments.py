"""What changes the logits of a sequence before its next token is drawn: penalties, biases and a grammar.

In this order, on the logits of the model, before temperature, min-p, top-k and top-p:

1. repetition penalty: the logit of every token of prompt and output is divided by it if positive, else multiplied;
2. presence and frequency penalty: ``presence + frequency * count`` is subtracted from the logit of every token that
   occurs ``count`` > 0 times in the output;
3. logit bias: added;
4. structured output: tokens that may not come next get a logit of -inf.

Shapes: V vocabulary, S tokens of prompt and output, G tokens of the output, each once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from tinkex.engine.sampler.grammar import GrammarState
    from tinkex.types import SamplingParams

__all__ = ["LogitAdjustments"]


class LogitAdjustments:
    """The adjustments of one sequence; ``grammar`` is its state in the grammar of its structured output.

    Example:
        >>> from tinkex.types import SamplingParams
        >>> params = SamplingParams(logit_bias={1: 2.0}, frequency_penalty=0.5)
        >>> adjustments = LogitAdjustments(params, prompt_P=np.array([3]))
        >>> adjustments.append(0)
        >>> logits_V = np.zeros(4, np.float32)
        >>> adjustments.apply(logits_V)
        >>> logits_V.tolist()
        [-0.5, 2.0, 0.0, 0.0]
    """

    def __init__(
        self, params: SamplingParams, prompt_P: npt.NDArray[np.int32], grammar: GrammarState | None = None
    ) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty or 0.0
        self._frequency = params.frequency_penalty or 0.0
        self._seen = dict.fromkeys(prompt_P.tolist()) if self._repetition is not None else {}
        self._counts: Counter[int] = Counter()
        bias = params.logit_bias or {}
        self._biased = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self.grammar = grammar

    @classmethod
    def of(
        cls, params: SamplingParams, prompt_P: npt.NDArray[np.int32], grammar: GrammarState | None
    ) -> LogitAdjustments | None:
        """The adjustments of a new sequence; None if nothing would ever change."""
        wanted = (params.presence_penalty, params.frequency_penalty, params.logit_bias, grammar)
        if any(wanted) or params.repetition_penalty not in {None, 1.0}:
            return cls(params, prompt_P, grammar)
        return None

    def append(self, token: int) -> None:
        """Adds the next token of the output."""
        self._counts[token] += 1
        if self._repetition is not None:
            self._seen[token] = None
        if self.grammar is not None:
            self.grammar.advance(token)

    def apply(self, logits_V: npt.NDArray[np.float32]) -> None:
        """Adjusts the logits in place, in fp32; raises ``InvalidInput`` if the grammar turns out to be too complex.

        Logits that are not finite stay as they are, because the draw reports them.
        """
        if not np.isfinite(logits_V.max()):
            return
        if self._repetition is not None:
            seen_S = np.fromiter(self._seen, np.int64, len(self._seen))
            scores_S = logits_V[seen_S]
            logits_V[seen_S] = np.where(
                scores_S < 0, scores_S * self._repetition, scores_S / self._repetition
            )
        if self._presence or self._frequency:
            used_G = np.fromiter(self._counts, np.int64, len(self._counts))
            counts_G = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits_V[used_G] -= self._presence + self._frequency * counts_G
        logits_V[self._biased] += self._bias
        if self.grammar is not None:
            logits_V[~self.grammar.allowed()] = -np.inf
