"""Incremental detokenization: the text of a sequence as its tokens arrive."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from tinkex.types import StopReason


class IncrementalDetokenizer:
    """Turns tokens into text that is never revised.

    A character that is split between tokens is returned with the token that completes it. Text that may be the beginning
    of a stop string is buffered until it is clear that it is not; the stop string itself, and a token that ends the
    sequence, are not part of the text.

    >>> detokenizer = IncrementalDetokenizer("END", lambda token: bytes([token]))
    >>> [detokenizer.add(token, None) for token in b"aEx"]
    ['a', '', 'Ex']
    >>> [detokenizer.add(token, "stop" if token == ord("D") else None) for token in b"EEND"]
    ['', 'E', '', '']
    """

    def __init__(self, stop: str | Sequence[str | int] | None, token_bytes: Callable[[int], bytes]) -> None:
        wanted: Sequence[str | int] = [stop] if isinstance(stop, str) else stop or []
        self._strings = [text.encode("utf-8", "replace") for text in wanted if isinstance(text, str)]
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._buffer = b""

    def add(self, token: int, stop_reason: StopReason | None) -> str:
        """The text that is certain with this token; ``stop_reason`` is set on the last token of the sequence."""
        text = self._buffer + self._token_bytes(token)
        if stop_reason == "stop":
            hits = [place for string in self._strings if (place := text.find(string)) >= 0]
            text = text[: min(hits)] if hits else self._buffer
        if stop_reason is not None:
            return self._decoder.decode(text, final=True)
        certain = len(text) - self._ambiguous(text)
        self._buffer = text[certain:]
        return self._decoder.decode(text[:certain])

    def _ambiguous(self, text: bytes) -> int:
        """How many bytes at the end may be the beginning of a stop string."""
        return max(
            (
                length
                for string in self._strings
                for length in range(1, min(len(string), len(text) + 1))
                if text.endswith(string[:length])
            ),
            default=0,
        )
