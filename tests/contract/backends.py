"""The backends of a client: a mock, the embedded engine, a server, and a server with a pool of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tinkex
from tests.contract.names import BASE_MODEL

__all__ = ["ALL", "BASE_MODEL", "WITH_A_MODEL", "Backend"]

ALL = ("mock", "embedded", "server", "pool")
WITH_A_MODEL = ("embedded", "server", "pool")


@dataclass(frozen=True)
class Backend:
    """How to reach one of them."""

    service: Callable[..., tinkex.ServiceClient]
    rest: Callable[..., tinkex.RestClient]
