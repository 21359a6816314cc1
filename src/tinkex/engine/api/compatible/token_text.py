"""Logprobs in the forms of the OpenAI protocol: tokens as text, with the most likely ones beside them."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tinkex.engine.model.tokenizer import EngineTokenizer
from tinkex.engine.running.feeds import StreamedToken
from tinkex.types import SampledSequence, SampleResponse

MIN_LOGPROB = -9999.0
"""Stands for a probability of zero, which JSON cannot express as a logprob."""

Ranked: TypeAlias = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class TokenLogprobs:
    """Tokens in order, the logprob of each (None for the first of a prompt), and the most likely ones of each position."""

    tokens: Sequence[int]
    logprobs: Sequence[float | None]
    top: Sequence[Ranked | None] | None

    @classmethod
    def of_sample(cls, sequence: SampledSequence) -> TokenLogprobs:
        """Those of a sampled sequence."""
        return cls(sequence.tokens, sequence.logprobs or [], sequence.topk_logprobs)

    @classmethod
    def of_stream(cls, batch: Sequence[StreamedToken]) -> TokenLogprobs:
        """Those of some tokens of a stream."""
        return cls(
            [token.token for token in batch],
            [token.logprob for token in batch],
            [token.topk for token in batch],
        )

    @classmethod
    def of_prompt(cls, tokens: Sequence[int], response: SampleResponse) -> TokenLogprobs:
        """Those of a prompt."""
        return cls(tokens, response.prompt_logprobs or [], response.topk_prompt_logprobs)

    def rows(self) -> Sequence[tuple[int, float | None, Ranked]]:
        """Each token with its logprob and the most likely tokens of its position."""
        top = self.top or [None] * len(self.tokens)
        return [
            (token, logprob, ranked or [])
            for token, logprob, ranked in zip(self.tokens, self.logprobs, top, strict=True)
        ]


def token_text(tokenizer: EngineTokenizer, token: int) -> str:
    r"""The text of one token; one that is not valid UTF-8 by itself is ``bytes:\xe2\x82``."""
    spelled = tokenizer.decode_bytes([token])
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class TextOffsets:
    """Where tokens that arrive in parts start in their text.

    The end of the text does not limit them: tokens that a stop sequence cuts off the text start where they would without it,
    so a stream, whose end is not known in advance, has the same offsets as a response.
    """

    def __init__(self, tokenizer: EngineTokenizer, start: int = 0) -> None:
        self._tokenizer = tokenizer
        # A character may be spelled by several tokens, in several parts.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = start

    def add(self, tokens: Sequence[int]) -> Sequence[int]:
        """The offset of each of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._place)
            self._place += len(self._decoder.decode(self._tokenizer.decode_bytes([token])))
        return offsets


def completion_logprobs(
    tokenizer: EngineTokenizer, parts: Sequence[tuple[TokenLogprobs, TextOffsets]], num_top: int
) -> Mapping[str, Any]:
    """The ``logprobs`` of parts of a completion, each with the offsets of its text."""
    rows = [row for scored, _ in parts for row in scored.rows()]
    return {
        "tokens": [token_text(tokenizer, token) for token, _, _ in rows],
        "token_logprobs": [_finite(logprob) for _, logprob, _ in rows],
        "top_logprobs": [_top(tokenizer, row, num_top) for row in rows],
        "text_offset": [place for scored, offsets in parts for place in offsets.add(scored.tokens)],
    }


def chat_logprobs(
    tokenizer: EngineTokenizer, scored: TokenLogprobs, num_top: int
) -> Sequence[Mapping[str, Any]]:
    """The ``logprobs.content`` of a chat completion."""
    return [
        {
            **_entry(tokenizer, token, logprob),
            "top_logprobs": [_entry(tokenizer, *ranked) for ranked in top[:num_top]],
        }
        for token, logprob, top in scored.rows()
    ]


def _entry(tokenizer: EngineTokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.decode_bytes([token])),
    }


def _top(
    tokenizer: EngineTokenizer, row: tuple[int, float | None, Ranked], num_top: int
) -> Mapping[str, float | None] | None:
    token, logprob, ranked = row
    if logprob is None:
        return None
    found: dict[str, float | None] = {}
    # The most likely first: of tokens with the same text the first is kept.
    for other, value in [*ranked[:num_top], (token, logprob)]:
        found.setdefault(token_text(tokenizer, other), _finite(value))
    return found


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)
