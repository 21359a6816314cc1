"""The backends of a client: a mock, the embedded engine, and servers: with one worker, a pool of them, and workers on Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tinkex
from tests.contract.names import BASE_MODEL

__all__ = ["ALL", "BASE_MODEL", "FIXTURES", "WITH_A_MODEL", "Backend"]

ALL = ("mock", "embedded", "server", "pool", "ray")
WITH_A_MODEL = ("embedded", "server", "pool", "ray")
FIXTURES = {"server": "served_engine", "pool": "served_pool", "ray": "served_ray"}
"""The fixtures of the servers."""


@dataclass(frozen=True)
class Backend:
    """How to reach one of them."""

    service: Callable[..., tinkex.ServiceClient]
    rest: Callable[..., tinkex.RestClient]
