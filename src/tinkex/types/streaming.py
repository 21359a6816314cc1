"""The events of a sample stream."""

from __future__ import annotations

from typing import TypeAlias

from tinkex.types.base import Value
from tinkex.types.sampling import StopReason

__all__ = ["SampleStreamDone", "SampleStreamEvent", "SampledToken"]


class SampledToken(Value, frozen=True, kw_only=True):
    """One token of one completion, as soon as it is sampled.

    ``text`` is the text that is final with this token: a character split across tokens comes with the last of them,
    and a possible prefix of a stop string is held back until it is ruled out. It is ``None`` if the server did not
    stream.

    >>> SampledToken(sample=0, index=0, token=42, logprob=-0.5, text="Hi").stop_reason is None
    True
    """

    sample: int
    index: int
    token: int
    logprob: float | None = None
    text: str | None = None
    stop_reason: StopReason | None = None
    """Set on the last token of a completion."""


class SampleStreamDone(Value, frozen=True, kw_only=True):
    """All completions have finished; ``streamed`` is False if the server returned all tokens in one response.

    >>> SampleStreamDone(stop_reasons=["length"], num_tokens=8, num_prompt_tokens=3).streamed
    True
    """

    stop_reasons: list[StopReason]
    num_tokens: int
    num_prompt_tokens: int
    prompt_cache_hit_tokens: int = 0
    streamed: bool = True


SampleStreamEvent: TypeAlias = SampledToken | SampleStreamDone
