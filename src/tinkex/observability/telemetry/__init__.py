"""Telemetry: what a program may report to its server about itself, and how exceptions are captured for it.

Nothing is sent to the engine in this process, nor where ``TINKER_TELEMETRY=0`` (``telemetry=False``) says so.

>>> with capture(None):  # a client without telemetry: the block runs as it stands
...     1 + 1
2
"""

from __future__ import annotations

from tinkex.observability.telemetry.capture import capture, is_user_error
from tinkex.observability.telemetry.reporter import Reporter, TelemetrySink

__all__ = ["Reporter", "TelemetrySink", "capture", "is_user_error"]
