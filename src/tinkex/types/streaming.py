"""What a stream of samples is made of."""

from __future__ import annotations

from typing import TypeAlias

from tinkex.types.base import Value
from tinkex.types.sampling import StopReason

__all__ = ["SampleStreamDone", "SampleStreamEvent", "SampledToken"]


class SampledToken(Value, frozen=True, kw_only=True):
    """One token of one continuation, as soon as it is drawn.

    ``text`` is what is certain with this token: a character split between tokens comes with the last of
    them, and what may begin a stop string comes when it is clear that it does not. It is ``None`` where the
    server did not stream and so said no text.

    >>> SampledToken(sample=0, index=0, token=42, logprob=-0.5, text="Hi").stop_reason is None
    True
    """

    sample: int
    index: int
    token: int
    logprob: float | None = None
    text: str | None = None
    stop_reason: StopReason | None = None
    """Set on the last token of a continuation."""


class SampleStreamDone(Value, frozen=True, kw_only=True):
    """All continuations have ended; ``streamed`` is False where the tokens came all at once at the end.

    >>> SampleStreamDone(stop_reasons=["length"], num_tokens=8, num_prompt_tokens=3).streamed
    True
    """

    stop_reasons: list[StopReason]
    num_tokens: int
    num_prompt_tokens: int
    prompt_cache_hit_tokens: int = 0
    streamed: bool = True


SampleStreamEvent: TypeAlias = SampledToken | SampleStreamDone
