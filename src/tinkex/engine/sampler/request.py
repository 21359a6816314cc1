"""A running sampling request: its continuations, their random numbers and their output so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tinkex.engine.sampler.adjustments import LogitAdjustments
from tinkex.engine.sampler.job import SampleJob, max_new_tokens
from tinkex.engine.sampler.logits import RowSettings, sample_rng
from tinkex.engine.sampler.prompt_scores import PromptScores
from tinkex.errors import EngineFailure, NumericalError
from tinkex.types import SampledSequence, SampleResponse, StopReason, TopkLogprobs
from tinkex.types.sampling import EMPTY_LOGPROB

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.sampler.decode_cache import DecodeSlot
    from tinkex.engine.sampler.grammar import GrammarState
    from tinkex.engine.sampler.stopping import StopChecker, StopRule, TokenBytes

__all__ = ["Continuation", "RunningRequest"]


@dataclass(eq=False)
class Continuation:
    """One sequence of a request, extended token by token."""

    request: RunningRequest
    index: int
    sequence_id: str
    settings: RowSettings
    limit: int
    rng: np.random.Generator
    stop_checker: StopChecker
    adjustments: LogitAdjustments | None = None
    """What changes its logits; None for most sequences."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    topk_logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    stop_reason: StopReason | None = None
    slot: DecodeSlot | None = None
    _uniform: float | None = None

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: arrival order, the oldest first."""
        return self.request.order, self.index

    def uniform(self) -> float:
        """The random number of the next token, the same until that is appended; a greedy sequence uses none."""
        if self._uniform is None:
            self._uniform = 0.0 if self.settings.greedy else self.rng.random()
        return self._uniform

    def append(self, token: int, logprob: float) -> None:
        """Appends a token, and ends the sequence if it stops there or reaches its limit."""
        self._uniform = None
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.adjustments is not None:
            self.adjustments.append(token)
        if self.stop_checker.stops(token) or self._text_is_complete():
            self.stop_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.stop_reason = "length"
        self.request.num_open -= self.stop_reason is not None
        if self.request.on_token is not None:
            self.request.on_token(self)

    def _text_is_complete(self) -> bool:
        """Whether its structured output ended with this token, also where ``stop=[]`` ignores the end-of-text token."""
        grammar = None if self.adjustments is None else self.adjustments.grammar
        return grammar is not None and grammar.complete

    def append_topk(self, ids: Tensor, logprobs: Tensor) -> None:
        """Adds the top-k tokens at the position of the next token; those that a grammar excludes are left out."""
        # As arrays: Python numbers take ten times the memory.
        self.topk_ids.append(ids.numpy().astype(np.int32))
        self.topk_logprobs.append(np.where(np.isneginf(logprobs.numpy()), EMPTY_LOGPROB, logprobs.numpy()))

    def topk(self, start: int, end: int) -> TopkLogprobs | None:
        """The top-k tokens at the positions from ``start`` to ``end``; None if there are none."""
        if not self.topk_ids or start == end:
            return None
        return TopkLogprobs(np.stack(self.topk_ids[start:end]), np.stack(self.topk_logprobs[start:end]))

    def result(self) -> SampledSequence:
        """The finished sequence."""
        assert self.stop_reason is not None
        return SampledSequence(
            stop_reason=self.stop_reason,
            sequence_id=self.sequence_id,
            tokens_np=np.array(self.tokens, np.int32),
            logprobs_np=np.array(self.logprobs, np.float32),
            topk_logprobs_np=self.topk(0, len(self.tokens)),
        )


class RunningRequest:
    """An accepted job; ``order`` counts arrivals."""

    def __init__(
        self,
        job: SampleJob,
        *,
        order: int,
        arch: Architecture,
        stop: StopRule,
        token_bytes: TokenBytes,
        new_grammar: Callable[[], GrammarState | None] = lambda: None,
    ) -> None:
        self.job = job
        self.order = order
        self.scores = PromptScores(job)
        self.cache_hit_tokens = 0
        self.num_open = job.num_samples
        """How many continuations have not ended."""
        self.on_token: Callable[[Continuation], None] | None = None
        """Called with the continuation after every token."""
        params = job.params
        self.continuations = [
            Continuation(
                request=self,
                index=index,
                sequence_id=sequence_id,
                settings=RowSettings(
                    params.temperature, min(params.top_k, arch.vocab_size), params.top_p, params.min_p or 0.0
                ),
                limit=max_new_tokens(len(job.prompt_P), params.max_tokens, arch.max_context),
                rng=sample_rng(params.seed, index),
                stop_checker=stop.checker(token_bytes),
                adjustments=LogitAdjustments.of(params, job.prompt_P, new_grammar()),
            )
            for index, sequence_id in enumerate(job.sequence_ids)
        ]

    @property
    def done(self) -> bool:
        """Whether every continuation has ended."""
        return self.num_open == 0

    def too_large(self) -> EngineFailure:
        """The error of a request that does not fit into memory."""
        return EngineFailure(
            f"request {self.job.request_id!r}: a prompt of {len(self.job.prompt_P):,} tokens needs more memory than is free, "
            "even alone; send a shorter prompt, or run the engine with more memory"
        )

    def not_finite(self) -> NumericalError:
        """The error of a request whose logits are NaN or infinite."""
        weights = "the base model" if self.job.adapter is None else "this sampler's weights"
        return NumericalError(
            f"request {self.job.request_id!r}: {weights} gave logits that are not finite; the training run behind "
            "them has probably diverged, so sample from an earlier checkpoint"
        )

    def response(self) -> SampleResponse:
        """The response, once all continuations have ended; in the order of the job's sequence ids."""
        return SampleResponse(
            sequences=[continuation.result() for continuation in self.continuations],
            prompt_logprobs_np=self.scores.prompt_logprobs_P,
            topk_prompt_logprobs_np=self.scores.topk,
            target_prompt_logprobs=self.scores.target_logprobs,
            prompt_cache_hit_tokens=self.cache_hit_tokens,
            prompt_alt_tokens=self.scores.alternatives,
        )
