"""Sampling: parameters, requests, and sequences with their logprobs."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tinkex.types.base import Options, SuggestingType, Value
from tinkex.types.coercion import as_float, as_int, coerce
from tinkex.types.display import html_table, show_fields
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
    "StructuredOutput",
    "TopkLogprobs",
]

StopReason = Literal["length", "stop"]

EMPTY_LOGPROB = -99999.0
"""Marks an unused cell of a top-k table; a position whose first cell is unused is ``None``."""


MAX_SCHEMA_DEPTH = 64
"""How deeply a JSON schema may be nested."""


class StructuredOutput(Options, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of a sample must be: JSON of a schema, a match of a regular expression, or a sentence of a grammar.

    Exactly one field is set. ``json_schema`` is a JSON schema, or True for any JSON object; ``regex`` matches the whole text;
    ``grammar`` is in the Lark format, and starts with the rule ``start``.

    >>> StructuredOutput(json_schema={"type": "integer"}).model_dump()
    {'json_schema': {'type': 'integer'}}
    >>> StructuredOutput(regex="[0-9]+").kind
    'regex'
    """

    json_schema: dict[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        coerce(self)
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "nothing"
            raise ValueError(f"StructuredOutput takes one of json_schema, regex and grammar, got {what}")
        if self.json_schema is False:
            raise ValueError(
                "StructuredOutput.json_schema must be a schema, or True for any JSON object, got False"
            )
        if isinstance(self.json_schema, dict) and not _fits(self.json_schema, MAX_SCHEMA_DEPTH):
            raise ValueError(
                f"StructuredOutput.json_schema is nested deeper than {MAX_SCHEMA_DEPTH} levels; use $defs and $ref"
            )

    @property
    def kind(self) -> Literal["json_schema", "regex", "grammar"]:
        """The field that is set."""
        if self.json_schema is not None:
            return "json_schema"
        return "regex" if self.regex is not None else "grammar"


MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0


class SamplingParams(Options, frozen=True, kw_only=True, metaclass=SuggestingType):
    """Sampling parameters.

    ``max_tokens`` is capped at what the model's context has left after the prompt, which is also its default: a sequence
    with ``stop_reason`` ``"length"`` and fewer tokens has reached the end of the context. ``temperature`` 0 is greedy;
    ``top_k`` -1 is off; ``stop`` is a string, a list of strings, or a list of token ids, ``[]`` never stops, ``None`` stops at
    the model's end-of-sequence token.

    The fields from ``min_p`` on are an extension of ours. They are not sent where they are None, and a client raises
    ``Unsupported`` instead of sending them to a server that does not offer them.

    >>> SamplingParams(max_tokens=16, temperature=0.7).top_p
    1.0
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float | None = None
    """Tokens less probable than this fraction of the most probable one are not drawn; in [0, 1]."""
    presence_penalty: float | None = None
    """Subtracted from the logit of every token that was generated; in [-2, 2]."""
    frequency_penalty: float | None = None
    """Subtracted from the logit of every token for each time it was generated; in [-2, 2]."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens of the prompt and the output; in [0.01, 100]."""
    logit_bias: Mapping[int, float] | None = None
    """Token id → number in [-100, 100] that is added to its logit."""
    structured_output: StructuredOutput | None = None
    """What the text must be; other tokens are never drawn."""

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
        for name in self.extensions():
            self._check_extension(name, getattr(self, name))

    def _check_extension(self, name: str, value: Any) -> None:
        if name in EXTENSION_RANGES:
            low, high = EXTENSION_RANGES[name]
            if not low <= value <= high:
                raise ValueError(f"SamplingParams.{name} must be in [{low:g}, {high:g}], got {value}")
        elif name == "logit_bias":
            msgspec.structs.force_setattr(self, name, _logit_bias(value))

    def extensions(self) -> list[str]:
        """The names of the fields that are set and that the official service does not have.

        >>> SamplingParams(max_tokens=16, min_p=0.1).extensions()
        ['min_p']
        """
        if (  # without a loop: bursts of thousands of samples pass here
            self.min_p is None
            and self.presence_penalty is None
            and self.frequency_penalty is None
            and self.repetition_penalty is None
            and self.logit_bias is None
            and self.structured_output is None
        ):
            return []
        return [name for name in SAMPLING_EXTENSIONS if getattr(self, name) is not None]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(_without_unset(dict(super().__iter__())).items())

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Returns the parameters as a plain dictionary, without the fields of our extension that are None.

        >>> SamplingParams(max_tokens=8, min_p=0.1).model_dump(exclude_defaults=True)
        {'max_tokens': 8, 'min_p': 0.1}
        """
        return _without_unset(super().model_dump(**options))


SAMPLING_EXTENSIONS = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "structured_output",
)
"""The fields of ``SamplingParams`` that the official service does not have."""

EXTENSION_RANGES: Mapping[str, tuple[float, float]] = {
    "min_p": (0.0, 1.0),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": (1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}


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

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Returns the request as a plain dictionary, without the fields of our extension that are None."""
        dumped = super().model_dump(**options)
        if "sampling_params" in dumped:
            dumped["sampling_params"] = _without_unset(dumped["sampling_params"])
        return dumped


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


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        return show_fields(self, ("stop_reason", "sequence_id", "tokens", "logprobs"))


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        return show_fields(self, ("sequences", "prompt_logprobs"))

    def _repr_html_(self) -> str:
        rows = [
            (number, one.stop_reason, len(one.tokens), float(np.mean(one.logprobs)) if one.logprobs else "")
            for number, one in enumerate(self.sequences, 1)
        ]
        return html_table("SampleResponse", ("sequence", "stop reason", "tokens", "mean logprob"), rows)


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


def _logit_bias(given: Mapping[Any, Any]) -> dict[int, float]:
    """Returns a copy with checked token ids and numbers."""
    bias: dict[int, float] = {}
    for key, value in given.items():
        token = as_int(key, "SamplingParams.logit_bias: a token id")
        if token < 0:
            raise ValueError(f"SamplingParams.logit_bias: a token id must be at least 0, got {token}")
        number = as_float(value, f"SamplingParams.logit_bias[{token}]")
        if not -MAX_LOGIT_BIAS <= number <= MAX_LOGIT_BIAS:
            raise ValueError(
                f"SamplingParams.logit_bias[{token}] must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], got {number}"
            )
        bias[token] = number
    return bias


def _without_unset(dumped: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of ``SamplingParams`` without those of our extension that are None."""
    return {
        name: item for name, item in dumped.items() if item is not None or name not in SAMPLING_EXTENSIONS
    }


def _fits(value: Any, depth: int) -> bool:
    """Whether a JSON value is nested at most ``depth`` levels deep."""
    level: list[Any] = [value]
    for _ in range(depth):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return True
    return False


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
