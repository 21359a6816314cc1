"""When a sequence ends: end-of-text tokens, stop tokens, and stop strings in the bytes of the output.

Stop strings are searched in bytes, not in text: a token can end in the middle of a UTF-8 sequence, and a stop string can
start in one token and end in another. This is exact, because the bytes of one UTF-8 string occur in those of another only
where the string itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tinkex.errors import InvalidInput

__all__ = ["MAX_STOP_STRINGS", "StopChecker", "StopRule", "TokenBytes"]

MAX_STOP_STRINGS = 1024
"""Stop strings per request: each is searched at every token, while all other requests wait."""

TokenBytes = Callable[[int], bytes]
"""The exact bytes of one token."""


@dataclass(frozen=True)
class StopRule:
    """What ends the sequences of one request.

    Example:
        >>> rule = StopRule.of(stop="END", eos_token_ids=[2], vocab_size=49152)
        >>> rule.tokens, rule.strings
        (frozenset({2}), (b'END',))
    """

    tokens: frozenset[int] = frozenset()
    strings: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls,
        stop: str | Sequence[str | int] | None,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> StopRule:
        """Parses a request's ``stop``; the model's end-of-text tokens stop too, unless ``stop`` is an empty list."""
        if stop is None:
            return cls(tokens=frozenset(eos_token_ids))
        wanted: list[object] = [stop] if isinstance(stop, str) else list(stop)
        if not wanted:
            return cls()
        strings = [item for item in wanted if isinstance(item, str)]
        tokens = [item for item in wanted if isinstance(item, int) and not isinstance(item, bool)]
        if len(strings) == len(wanted):
            if "" in strings:
                raise InvalidInput(
                    "stop has an empty string, which would stop immediately; remove it (stop=[] never stops)"
                )
            different = list(dict.fromkeys(strings))
            if len(different) > MAX_STOP_STRINGS:
                raise InvalidInput(
                    f"stop has {len(different)} strings, and at most {MAX_STOP_STRINGS} are supported; give fewer, or use "
                    "token ids"
                )
            return cls(tokens=frozenset(eos_token_ids), strings=tuple(_utf8(text) for text in different))
        if len(tokens) == len(wanted):
            outside = [token for token in tokens if not 0 <= token < vocab_size]
            if outside:
                raise InvalidInput(
                    f"stop has token id {outside[0]}, and this model's ids are 0…{vocab_size - 1}; remove it or use its string"
                )
            return cls(tokens=frozenset(tokens) | frozenset(eos_token_ids))
        kinds = ", ".join(sorted({type(item).__name__ for item in wanted}))
        raise InvalidInput(
            f"stop must be a string, a list of strings or a list of token ids, and mixes {kinds}; use one type"
        )

    @cached_property
    def max_length(self) -> int:
        """The length of the longest string, in bytes."""
        return max(map(len, self.strings), default=0)

    def checker(self, token_bytes: TokenBytes) -> StopChecker:
        """A checker for one new sequence."""
        return StopChecker(self, token_bytes)


@dataclass
class StopChecker:
    """Checks the tokens of one sequence, in order, and says when it stops.

    Keeps only the last bytes that could start a stop string.

    Example:
        >>> checker = StopRule(strings=(b"ab",)).checker(lambda token: bytes([token]))
        >>> [checker.stops(token) for token in b"xaab"]
        [False, False, False, True]
    """

    rule: StopRule
    token_bytes: TokenBytes
    _tail: bytes = field(default=b"", init=False)

    def stops(self, token: int) -> bool:
        """Checks the next token; True if the sequence ends with it (the token is part of the output)."""
        if token in self.rule.tokens:
            return True
        if not self.rule.strings:
            return False
        # An earlier match would have ended the sequence, so a match here contains at least one new byte.
        text = self._tail + self.token_bytes(token)
        if any(string in text for string in self.rule.strings):
            return True
        keep = self.rule.max_length - 1
        self._tail = text[len(text) - keep :] if keep < len(text) else text
        return False


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"stop string {text!r} is not valid text: {error.reason}; remove the lone surrogate"
        ) from error
