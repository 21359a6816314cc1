"""Generates the page of events from the classes in ``tinkex.observability.events``."""

from __future__ import annotations

import dataclasses
import typing

from tinkex.observability import events
from tinkex.observability.telemetry.redaction import REPORTED

ORIGINAL = {
    "RequestStarted": "http.request.start",
    "RequestFinished": "http.request.stop, http.request.exception (`error`)",
    "RetryScheduled": "retry.attempt.retry",
    "QueueStateChanged": "queue.state_change",
    "StillWaiting": "future.timeout",
    "RunUnhealthy": "recovery.detected",
    "RunCheckFailed": "recovery.poll_error",
    "RecoveryStarted": "recovery.started, recovery.checkpoint_selected",
    "RunRecovered": "recovery.client_created, recovery.completed",
    "RecoveryFailed": "recovery.failed, recovery.exhausted (`after_s` is None)",
    "CustomLossStarted": "custom_loss.start",
    "CustomLossFinished": "custom_loss.stop, custom_loss.exception (`error`)",
    "RegularizerStarted": "regularizer.compute.start",
    "RegularizerFinished": "regularizer.compute.stop, regularizer.compute.exception (`error`)",
}
"""The names of the original's events, by ours."""


def page() -> str:
    """Returns the page."""
    kinds = typing.get_args(events.Event)
    lines = [
        "# Events",
        "",
        "<!-- Written by scripts/generate-docs; do not edit. Guide: guides/telemetry.md -->",
        "",
        "What a client emits: to its sink (`events=`), to the sinks of the process (`tinkex.observability.process`), to metrics and to",
        "telemetry. Each is a class of `tinkex.observability.events`; times are in seconds. Telemetry reports those with a name in the",
        "last column, with the fields that are listed there; requests only if they failed, or all with `telemetry_requests`.",
        "",
        "| event | when | fields | in the original Tinkex | in telemetry |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in sorted(kinds, key=lambda one: one.__name__):
        text = " ".join((kind.__doc__ or "").split()).replace("``", "`")
        when = text.partition(". ")[0].rstrip(".").replace("|", "\\|")
        names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
        reported = REPORTED.get(kind)
        sent = ""
        if reported is not None:
            sent = f"`tinkex.{kind.__name__}`" + (f": {', '.join(reported)}" if reported else "")
        original = ORIGINAL.get(kind.__name__, "")
        lines.append(f"| `{kind.__name__}` | {when} | {names} | {original} | {sent} |")
    unknown = set(ORIGINAL) - {kind.__name__ for kind in kinds}
    if unknown:
        raise SystemExit(f"scripts/docsite/events_page.py names events that do not exist: {sorted(unknown)}")
    return "\n".join(lines) + "\n"
