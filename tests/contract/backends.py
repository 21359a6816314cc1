"""The three things that may stand behind a client: a mock, the engine in this process, a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tinkex
from tests.contract.names import BASE_MODEL

__all__ = ["BASE_MODEL", "Backend"]


@dataclass(frozen=True)
class Backend:
    """How to reach one of them, and what it cannot show."""

    service: Callable[..., tinkex.ServiceClient]
    rest: Callable[..., tinkex.RestClient]
    real: bool = True
    """A model stands behind it."""
    keyless: bool = False
    """There is no door, so no key."""


def pointing(options: dict[str, Any], **facts: bool) -> Backend:
    """A backend whose clients are made with the given settings."""
    return Backend(
        service=lambda **more: tinkex.ServiceClient(**{**options, **more}),
        rest=lambda **more: tinkex.RestClient(**{**options, **more}),
        **facts,
    )
