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


def completion_logprobs(
    tokenizer: EngineTokenizer, scored: Sequence[TokenLogprobs], text: str, num_top: int, offset: int = 0
) -> Mapping[str, Any]:
    """The ``logprobs`` of a completion whose text starts at ``offset``."""
    rows = [row for part in scored for row in part.rows()]
    return {
        "tokens": [token_text(tokenizer, token) for token, _, _ in rows],
        "token_logprobs": [_finite(logprob) for _, logprob, _ in rows],
        "top_logprobs": [_top(tokenizer, row, num_top) for row in rows],
        "text_offset": _offsets(tokenizer, [token for token, _, _ in rows], offset, offset + len(text)),
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


def _offsets(tokenizer: EngineTokenizer, tokens: Sequence[int], start: int, end: int) -> Sequence[int]:
    """Where each token starts in the text; a token that the text does not contain starts at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, place = [], start
    for token in tokens:
        offsets.append(min(place, end))
        place += len(decoder.decode(tokenizer.decode_bytes([token])))
    return offsets
