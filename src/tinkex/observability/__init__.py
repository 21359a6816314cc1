"""What the client reports while it works: typed events, and what subscribes to them.

Each fact is an event (``events``) that is emitted once, on the client's bus (``bus``). The log, metrics, telemetry, queue
observers (``queues``) and the spans of operations (``tracing``) receive it. ``process`` attaches sinks to all clients of the
process. ``terminal`` draws progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.observability import bus as bus
    from tinkex.observability import events as events
    from tinkex.observability import metrics as metrics
    from tinkex.observability import process as process
    from tinkex.observability import queues as queues
    from tinkex.observability import telemetry as telemetry
    from tinkex.observability import terminal as terminal
    from tinkex.observability import tracing as tracing

__all__ = ["bus", "events", "metrics", "process", "queues", "telemetry", "terminal", "tracing"]


def __getattr__(name: str) -> object:
    """Loads a module at its first use: the engine needs only ``tracing``."""
    from importlib import import_module

    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
