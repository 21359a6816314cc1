"""When a sequence ends: end-of-text tokens, stop tokens, and stop strings found in the bytes of the output.

Stop strings are searched in bytes, not in text: a token may end in the middle of a character, and a stop
string may begin in one token and end in another. UTF-8 makes this exact, because the bytes of one string
occur in those of another only where the string itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tinkex.errors import InvalidInput

__all__ = ["MAX_STOP_STRINGS", "StopRule", "StopWatch", "TokenBytes"]

MAX_STOP_STRINGS = 1024
"""The most strings one request may stop at: each is looked for at every token, while all other requests wait."""

TokenBytes = Callable[[int], bytes]
"""The exact bytes one token stands for."""


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
        """Reads a request's ``stop``; the model's end-of-text tokens stop too, unless ``stop`` is an empty list."""
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
                    "stop holds an empty string, which would stop at once; remove it (stop=[] never stops)"
                )
            different = list(dict.fromkeys(strings))
            if len(different) > MAX_STOP_STRINGS:
                raise InvalidInput(
                    f"stop holds {len(different)} strings, and at most {MAX_STOP_STRINGS} are looked for; give fewer, or stop "
                    "at token ids"
                )
            return cls(tokens=frozenset(eos_token_ids), strings=tuple(_utf8(text) for text in different))
        if len(tokens) == len(wanted):
            outside = [token for token in tokens if not 0 <= token < vocab_size]
            if outside:
                raise InvalidInput(
                    f"stop holds token id {outside[0]}, and this model's ids are 0…{vocab_size - 1}; remove it or use its string"
                )
            return cls(tokens=frozenset(tokens) | frozenset(eos_token_ids))
        kinds = ", ".join(sorted({type(item).__name__ for item in wanted}))
        raise InvalidInput(
            f"stop must be a string, a list of strings or a list of token ids, and mixes: {kinds}; use one kind"
        )

    @cached_property
    def longest(self) -> int:
        """How many bytes the longest string has."""
        return max(map(len, self.strings), default=0)

    def watch(self, token_bytes: TokenBytes) -> StopWatch:
        """A watch over one new sequence."""
        return StopWatch(self, token_bytes)


@dataclass
class StopWatch:
    """Looks at one sequence's tokens as they come and says when it has stopped.

    Only the last bytes that could begin a stop string are kept.

    Example:
        >>> watch = StopRule(strings=(b"ab",)).watch(lambda token: bytes([token]))
        >>> [watch.stops(token) for token in b"xaab"]
        [False, False, False, True]
    """

    rule: StopRule
    token_bytes: TokenBytes
    _tail: bytes = field(default=b"", init=False)

    def stops(self, token: int) -> bool:
        """Takes the next token; True if the sequence ends with it (the token belongs to the output)."""
        if token in self.rule.tokens:
            return True
        if not self.rule.strings:
            return False
        # An earlier hit would have ended the sequence, so any hit here uses at least one new byte.
        text = self._tail + self.token_bytes(token)
        if any(string in text for string in self.rule.strings):
            return True
        keep = self.rule.longest - 1
        self._tail = text[len(text) - keep :] if keep < len(text) else text
        return False


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"stop string {text!r} is not valid text: {error.reason}; remove the lone surrogate"
        ) from error
