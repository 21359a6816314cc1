"""One sampling request, and the checks it must pass before it is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampler.stopping import StopRule
from tinkex.errors import InvalidInput

if TYPE_CHECKING:
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.model.lora import Adapter
    from tinkex.types import SampleRequest, SamplingParams, TensorData

__all__ = ["MAX_TOPK_LOGPROBS", "MIN_TEMPERATURE", "TOP_K_OFF", "SampleJob", "check_job", "max_new_tokens"]

TOP_K_OFF = -1
MIN_TEMPERATURE = 1e-6
"""Below this, except for 0, scaled logits leave the range of fp32."""
MAX_TEMPERATURE = 1e6
"""Every distribution is uniform long before this."""

MAX_TOPK_LOGPROBS = 1024
"""Top-k logprobs per token, so that the response for a long prompt fits into memory."""

MAX_TOPK_CELLS = 1 << 25
"""Top-k logprobs over all tokens of a request: 268 MB while it runs, and as much again in the response."""

MAX_PROMPT_DRAWS = 1 << 21
"""Alternatives drawn for one prompt, over all its positions: 42 MB while it runs."""

MAX_BIASED_TOKENS = 1024
"""Entries of a logit bias."""

SKIPPED_TARGET = -1


@dataclass(frozen=True, eq=False)
class SampleJob:
    """A prompt to continue ``num_samples`` times under one adapter (``None`` = the base model).

    ``adapter`` is an immutable snapshot; jobs of one owner that pass the same object share cached prompts.

    Example:
        >>> from tinkex.types import SamplingParams
        >>> job = SampleJob("req-1", None, np.array([1, 5, 9], np.int32), 2, SamplingParams(max_tokens=8), ["a", "b"])
    """

    request_id: str
    adapter: Adapter | None
    prompt_P: npt.NDArray[np.int32]
    num_samples: int
    params: SamplingParams
    sequence_ids: Sequence[str]
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    owner: str = ""
    """The user of the job; only jobs of one user share cached prompts."""

    @classmethod
    def of(
        cls,
        request: SampleRequest,
        *,
        request_id: str,
        adapter: Adapter | None,
        sequence_ids: Sequence[str],
        owner: str = "",
    ) -> SampleJob:
        """The job of a request; raises ``InvalidInput`` for a prompt that is not text."""
        kinds = {chunk.type for chunk in request.prompt.chunks} - {"encoded_text"}
        if kinds:
            raise InvalidInput(
                f"prompt has {', '.join(sorted(kinds))} chunks, and this model reads text only; send encoded_text chunks"
            )
        return cls(
            request_id=request_id,
            adapter=adapter,
            prompt_P=request.prompt.to_numpy(),
            num_samples=request.num_samples,
            params=request.sampling_params,
            sequence_ids=sequence_ids,
            prompt_logprobs=bool(request.prompt_logprobs),
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_sample_logprobs=request.topk_sample_logprobs,
            target_prompt_logprobs=request.target_prompt_logprobs,
            prompt_alt_tokens_k=request.prompt_alt_tokens_k,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            owner=owner,
        )


def max_new_tokens(prompt_length: int, max_tokens: int | None, max_context: int) -> int:
    """How many tokens a sequence may have: ``max_tokens``, or what the context has left, whichever is less.

    A prompt that fills the whole context still gets one token, because predicting it needs no new position.

    Example:
        >>> max_new_tokens(100, None, 128), max_new_tokens(100, 8, 128), max_new_tokens(128, 8, 128)
        (28, 8, 1)
    """
    room = max(1, max_context - prompt_length)
    return room if max_tokens is None else min(max_tokens, room)


def check_job(job: SampleJob, arch: Architecture, eos_token_ids: Sequence[int]) -> StopRule:
    """Raises ``InvalidInput``, which names the field, for a job that cannot be sampled; returns its stop rule."""
    _check_prompt(job.prompt_P, arch)
    _check_counts(job, arch)
    _check_params(job.params)
    _check_logit_bias(job.params, arch)
    if job.target_prompt_logprobs is not None:
        _check_targets(job.target_prompt_logprobs, len(job.prompt_P), arch)
    return StopRule.of(job.params.stop, eos_token_ids=eos_token_ids, vocab_size=arch.vocab_size)


def _check_prompt(prompt_P: npt.NDArray[np.int32], arch: Architecture) -> None:
    if prompt_P.ndim != 1 or prompt_P.dtype.kind != "i":
        raise InvalidInput(
            f"prompt must be a flat list of token ids, and has shape {prompt_P.shape} and dtype {prompt_P.dtype}"
        )
    if not len(prompt_P):
        raise InvalidInput(
            "prompt is empty; give at least one token, such as the model's beginning-of-text token"
        )
    if len(prompt_P) > arch.max_context:
        raise InvalidInput(
            f"prompt has {len(prompt_P)} tokens, and this model's context holds {arch.max_context}; shorten the prompt"
        )
    outside = np.flatnonzero((prompt_P < 0) | (prompt_P >= arch.vocab_size))
    if len(outside):
        at = int(outside[0])
        raise InvalidInput(
            f"prompt token {int(prompt_P[at])} at index {at} is not in this model's vocabulary of ids "
            f"0…{arch.vocab_size - 1}; encode the prompt with this model's tokenizer"
        )


def _check_counts(job: SampleJob, arch: Architecture) -> None:
    if job.num_samples < 1:
        raise InvalidInput(f"num_samples must be at least 1, and is {job.num_samples}")
    if len(job.sequence_ids) != job.num_samples:
        raise InvalidInput(
            f"num_samples is {job.num_samples}, and {len(job.sequence_ids)} sequence ids were given"
        )
    max_topk = min(MAX_TOPK_LOGPROBS, arch.vocab_size)
    for name, value in (
        ("topk_prompt_logprobs", job.topk_prompt_logprobs),
        ("topk_sample_logprobs", job.topk_sample_logprobs),
        ("prompt_alt_tokens_k", job.prompt_alt_tokens_k),
    ):
        if not 0 <= value <= max_topk:
            raise InvalidInput(f"{name} must lie in 0…{max_topk}, and is {value}")
    num_new = max_new_tokens(len(job.prompt_P), job.params.max_tokens, arch.max_context)
    for name, k, num_tokens in (
        ("topk_prompt_logprobs", job.topk_prompt_logprobs, len(job.prompt_P)),
        ("topk_sample_logprobs", job.topk_sample_logprobs, job.num_samples * num_new),
    ):
        if k * num_tokens > MAX_TOPK_CELLS:
            raise InvalidInput(
                f"{name} is {k} for {num_tokens} tokens, which makes {k * num_tokens} logprobs, and at most {MAX_TOPK_CELLS} "
                "are reported; request fewer, fewer tokens (max_tokens), or use several requests"
            )
    draws = len(job.prompt_P) * job.prompt_alt_tokens_k
    if draws > MAX_PROMPT_DRAWS:
        raise InvalidInput(
            f"prompt_alt_tokens_k is {job.prompt_alt_tokens_k}, which makes {draws} alternatives for a prompt of "
            f"{len(job.prompt_P)} tokens, and at most {MAX_PROMPT_DRAWS} are drawn; request fewer, or use several requests"
        )
    last_n = job.prompt_logprobs_last_n
    if last_n is not None and last_n < 1:
        raise InvalidInput(f"prompt_logprobs_last_n must be at least 1, and is {last_n}; omit it for all")
    if last_n is not None and not job.prompt_logprobs:
        raise InvalidInput(
            f"prompt_logprobs_last_n is {last_n} without prompt_logprobs; set prompt_logprobs too"
        )


def _check_params(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidInput(
            f"max_tokens must be at least 1, and is {params.max_tokens}; omit it for as many as fit"
        )
    if not (params.temperature == 0 or MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE):
        raise InvalidInput(
            f"temperature must be 0 (greedy) or lie in {MIN_TEMPERATURE:g}…{MAX_TEMPERATURE:g}, and is {params.temperature}"
        )
    if params.top_k != TOP_K_OFF and params.top_k < 1:
        raise InvalidInput(f"top_k must be at least 1, or {TOP_K_OFF} to disable it, and is {params.top_k}")
    if not 0 < params.top_p <= 1:
        raise InvalidInput(f"top_p must lie in (0, 1], and is {params.top_p}; 1 disables it")


def _check_logit_bias(params: SamplingParams, arch: Architecture) -> None:
    bias = params.logit_bias or {}
    if len(bias) > MAX_BIASED_TOKENS:
        raise InvalidInput(
            f"logit_bias has {len(bias)} tokens, and at most {MAX_BIASED_TOKENS} are supported; give fewer"
        )
    outside = [token for token in bias if not 0 <= token < arch.vocab_size]
    if outside:
        raise InvalidInput(
            f"logit_bias has token id {outside[0]}, and this model's ids are 0…{arch.vocab_size - 1}; remove it"
        )


def _check_targets(targets: TensorData, prompt_length: int, arch: Architecture) -> None:
    if targets.dtype != "int64":
        raise InvalidInput(
            f"target_prompt_logprobs must contain int64 token ids, and has dtype {targets.dtype}"
        )
    shape = targets.shape
    if shape is None or len(shape) != 2 or shape[0] != prompt_length - 1:
        raise InvalidInput(
            f"target_prompt_logprobs must have the shape [{prompt_length - 1}, K] for a prompt of {prompt_length} tokens "
            f"(row i is for token i+1), and has {shape}"
        )
    values = targets.array
    outside = values[(values != SKIPPED_TARGET) & ((values < 0) | (values >= arch.vocab_size))]
    if len(outside):
        raise InvalidInput(
            f"target_prompt_logprobs contains token id {int(outside[0])}, and this model's ids are 0…{arch.vocab_size - 1}; "
            f"use {SKIPPED_TARGET} to skip a cell"
        )
