"""What the client reports while it works: typed events, and what subscribes to them.

Each fact is emitted once, as an event (:mod:`~tinkex.observability.events`). The log, metrics, telemetry and queue
observers are sinks of these events; :mod:`~tinkex.observability.tracing` makes the spans, and
:mod:`~tinkex.observability.terminal` draws progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.observability import events as events
    from tinkex.observability import metrics as metrics
    from tinkex.observability import telemetry as telemetry
    from tinkex.observability import terminal as terminal
    from tinkex.observability import tracing as tracing

__all__ = ["events", "metrics", "telemetry", "terminal", "tracing"]


def __getattr__(name: str) -> object:
    """Loads a module at its first use: the engine needs the spans alone."""
    from importlib import import_module

    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
