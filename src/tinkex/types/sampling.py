"""Sampling: parameters, requests, and sequences with their logprobs."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tinkex.types.base import Options, Value
from tinkex.types.coercion import coerce
from tinkex.types.inputs import ModelInput
from tinkex.types.tensors import TensorData

__all__ = [
    "CreateSamplingSessionRequest",
    "CreateSamplingSessionResponse",
    "GetSamplerResponse",
    "JoinSamplingSessionRequest",
    "JoinSamplingSessionResponse",
    "PromptAltTokens",
    "SampleRequest",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "StopReason",
    "TopkLogprobs",
]

StopReason = Literal["length", "stop"]

EMPTY_LOGPROB = -99999.0
"""Marks an unused cell of a top-k table; a position whose first cell is unused is ``None``."""


class SamplingParams(Options, frozen=True, kw_only=True):
    """Sampling parameters.

    ``temperature`` 0 is greedy; ``top_k`` -1 is off; ``stop`` is a string, a list of strings, or a list of
    token ids, ``[]`` never stops, ``None`` stops at the model's end-of-sequence token.

    >>> SamplingParams(max_tokens=16, temperature=0.7).top_p
    1.0
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.stop is not None and type(self.stop) is not str:
            msgspec.structs.force_setattr(self, "stop", _stops(self.stop))
        coerce(self)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"SamplingParams.max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"SamplingParams.temperature must be finite and ≥ 0, got {self.temperature}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"SamplingParams.top_k must be at least 1, or -1 for off, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p must be in (0, 1], got {self.top_p}")


class SampleRequest(Options, frozen=True, kw_only=True):
    """One prompt to continue ``num_samples`` times."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"

    def __post_init__(self) -> None:
        # Fast path for bursts of thousands of requests: skip coerce() if the usual fields have the right types.
        if not (
            type(self.prompt) is ModelInput
            and type(self.sampling_params) is SamplingParams
            and type(self.num_samples)
            is type(self.topk_prompt_logprobs)
            is type(self.topk_sample_logprobs)
            is int
            and type(self.prompt_alt_tokens_k) is int
            and self.target_prompt_logprobs is None
            and self.prompt_logprobs_last_n is None
            and type(self.prompt_logprobs) is bool
        ):
            coerce(self)


@dataclass(frozen=True, eq=False)
class TopkLogprobs:
    """The top-k tokens at each of n positions: two (n, k) matrices."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def rows(self) -> list[list[tuple[int, float]] | None]:
        """Returns the pairs (token id, logprob) of each position, or ``None`` if it has none."""
        out: list[list[tuple[int, float]] | None] = []
        for ids, logprobs in zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True):
            pairs = [(i, lp) for i, lp in zip(ids, logprobs, strict=True) if lp != EMPTY_LOGPROB]
            out.append(pairs or None)
        return out


@dataclass(frozen=True, eq=False)
class PromptAltTokens:
    """Alternative tokens per prompt position, with their logprobs."""

    tokens: TensorData
    logprobs: TensorData


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """One completion; ``tokens`` includes the stop token or the tokens of the stop string."""

    stop_reason: StopReason
    sequence_id: str
    tokens_np: npt.NDArray[np.int32]
    logprobs_np: npt.NDArray[np.float32] | None = None
    topk_logprobs_np: TopkLogprobs | None = None

    @cached_property
    def tokens(self) -> list[int]:
        """The token ids."""
        ids: list[int] = self.tokens_np.tolist()
        return ids

    @cached_property
    def logprobs(self) -> list[float] | None:
        """Logprob of each token under the distribution it was sampled from."""
        return None if self.logprobs_np is None else self.logprobs_np.tolist()

    @cached_property
    def topk_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """The top-k tokens at each position."""
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.rows()


@dataclass(frozen=True, eq=False)
class SampleResponse:
    """The completions of one prompt, and the requested logprobs of the prompt."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs_np: npt.NDArray[np.float32] | None = None
    topk_prompt_logprobs_np: TopkLogprobs | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        """Logprob of each prompt token; ``None`` for tokens without one (always the first)."""
        if self.prompt_logprobs_np is None:
            return None
        return [None if math.isnan(lp) else lp for lp in self.prompt_logprobs_np.tolist()]

    @cached_property
    def topk_prompt_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """The top-k tokens at each prompt position."""
        return None if self.topk_prompt_logprobs_np is None else self.topk_prompt_logprobs_np.rows()


def _stops(given: Any) -> str | list[str | int]:
    """Returns a string as it is, and a copy of a list of strings or token ids: the caller may reuse its list."""
    if isinstance(given, str):
        return given
    try:
        if isinstance(given, bytes | Mapping):
            raise TypeError("neither a string nor a list")
        stop = [one if isinstance(one, str) else operator.index(one) for one in given]
    except TypeError:
        raise ValueError(
            f"SamplingParams.stop must be a string, a list of strings, or a list of token ids, got {given!r}"
        ) from None
    if len({isinstance(one, str) for one in stop}) > 1:
        raise ValueError("SamplingParams.stop mixes strings and token ids; use one kind")
    return stop


class CreateSamplingSessionRequest(Options, frozen=True, kw_only=True):
    """Opens a sampler on a base model or on saved weights."""

    session_id: str
    sampling_session_seq_id: int = 0
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Value, frozen=True, kw_only=True):
    """The id of the new sampler."""

    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Options, frozen=True, kw_only=True):
    """Registers another process with a sampler."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Value, frozen=True, kw_only=True):
    """The number of the process, which makes its sequence numbers unique."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Value, frozen=True, kw_only=True):
    """The model of a sampler."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


def sample_response_as_json(response: SampleResponse) -> dict[str, Any]:
    """Returns the JSON form for clients without protobuf."""
    return {
        "sequences": [
            {"tokens": s.tokens, "logprobs": s.logprobs, "stop_reason": s.stop_reason}
            for s in response.sequences
        ],
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
        "type": "sample",
    }
