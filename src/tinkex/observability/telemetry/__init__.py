"""Telemetry: reports from a program to its server, and the capture of exceptions for them.

Nothing is sent to the embedded engine, or with ``TINKER_TELEMETRY=0`` (``telemetry=False``).

>>> with capture(None):  # a client without telemetry: the block just runs
...     1 + 1
2
"""

from __future__ import annotations

from tinkex.observability.telemetry.capture import capture
from tinkex.observability.telemetry.reporter import Reporter, TelemetrySink, is_user_error

__all__ = ["Reporter", "TelemetrySink", "capture", "is_user_error"]
