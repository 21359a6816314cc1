"""Exports the server's spans as the standard OpenTelemetry variables configure it; without them, nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tinkex._version import __version__
from tinkex.errors import SetupError
from tinkex.observability.tracing import find_tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["requested_exporters", "set_up_tracing"]

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
EXPORTERS = ("console", "none", "otlp")
FLUSH_TIMEOUT_S = 5.0
"""How long a shutdown waits for the export of the last spans."""


def requested_exporters(environ: Mapping[str, str]) -> list[str]:
    """Returns the exporters that the environment configures; none by default.

    >>> requested_exporters({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})
    ['otlp']
    >>> requested_exporters({"OTEL_TRACES_EXPORTER": "console, otlp"}), requested_exporters({})
    (['console', 'otlp'], [])
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if not named:
        return ["otlp"] if any(environ.get(name, "").strip() for name in ENDPOINTS) else []
    requested = [name.strip() for name in named.split(",") if name.strip()]
    unknown = sorted(set(requested) - set(EXPORTERS))
    if unknown:
        raise SetupError(
            f"OTEL_TRACES_EXPORTER contains the unknown exporter {unknown[0]!r}; choose from: {', '.join(EXPORTERS)}."
        )
    return [name for name in requested if name != "none"]


@contextlib.contextmanager
def set_up_tracing(environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Exports the spans of the block as the environment configures it; flushes them at the end.

    Does nothing if the process already has a tracer provider, for example from ``opentelemetry-instrument``.
    """
    environ = os.environ if environ is None else environ
    requested = requested_exporters(environ)
    if not requested or find_tracer() is not None:
        yield
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import set_tracer_provider

        exporters = [_exporter(name, environ) for name in requested]
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the environment enables tracing (OTEL_…), and {error.name} is not installed; run: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or set OTEL_TRACES_EXPORTER=none."
        ) from error
    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    name = {} if named else {"service.name": "tinkex"}
    provider = TracerProvider(
        resource=Resource.create({**name, "service.version": __version__}), shutdown_on_exit=False
    )
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    set_tracer_provider(provider)
    try:
        yield
    finally:
        # A collector that does not respond must not block the shutdown.
        flushing = threading.Thread(target=provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_TIMEOUT_S)


def _exporter(name: str, environ: Mapping[str, str]) -> SpanExporter:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)  # stdout carries only the ready line
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), HTTP)
    if protocol != HTTP:
        raise SetupError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; this server exports traces only with {HTTP} "
            "(port 4318 of a collector)."
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
