"""The backends of a client: a mock, the embedded engine, and servers: with one worker, a pool, and workers on one and three nodes of Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tinkex
from tests.contract.names import BASE_MODEL

__all__ = ["ALL", "BASE_MODEL", "FIXTURES", "WITH_A_MODEL", "Backend"]

ALL = ("mock", "embedded", "server", "pool", "ray", "cluster")
WITH_A_MODEL = ALL[1:]
FIXTURES = {
    "server": "served_engine",
    "pool": "served_pool",
    "ray": "served_ray",
    "cluster": "served_cluster",
}
"""The fixtures of the servers."""


@dataclass(frozen=True)
class Backend:
    """How to reach one of them."""

    service: Callable[..., tinkex.ServiceClient]
    rest: Callable[..., tinkex.RestClient]
