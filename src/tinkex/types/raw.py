"""Responses of calls that are made by their path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["RawResponse"]


@dataclass(frozen=True)
class RawResponse:
    """A response as the server sent it, decompressed; header names are in lower case.

    >>> RawResponse(status=200, body=b'{"status": "ok"}').json()
    {'status': 'ok'}
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)
    elapsed_s: float = 0.0
    """The duration of the call, with all retries."""

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON; raises ``ValueError`` if it is not."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
