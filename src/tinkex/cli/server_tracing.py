"""Where a server's spans go: to what the standard variables of OpenTelemetry name, and nowhere without them."""

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

__all__ = ["exporters_asked_for", "set_up_tracing"]

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
KNOWN = ("console", "none", "otlp")
FLUSH_S = 5.0
"""How long a server that stops waits for whoever takes its last spans."""


def exporters_asked_for(environ: Mapping[str, str]) -> list[str]:
    """Which exporters the environment wants; none where it does not mention any.

    >>> exporters_asked_for({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})
    ['otlp']
    >>> exporters_asked_for({"OTEL_TRACES_EXPORTER": "console, otlp"}), exporters_asked_for({})
    (['console', 'otlp'], [])
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if not named:
        return ["otlp"] if any(environ.get(name, "").strip() for name in ENDPOINTS) else []
    asked = [name.strip() for name in named.split(",") if name.strip()]
    unknown = sorted(set(asked) - set(KNOWN))
    if unknown:
        raise SetupError(
            f"OTEL_TRACES_EXPORTER names {unknown[0]!r}, which this server does not have; it has: {', '.join(KNOWN)}."
        )
    return [name for name in asked if name != "none"]


@contextlib.contextmanager
def set_up_tracing(environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Has the spans of the block exported as the environment says; at the end the last ones are handed over.

    A process that something else has set up already, such as ``opentelemetry-instrument``, is left as it is.
    """
    environ = os.environ if environ is None else environ
    asked = exporters_asked_for(environ)
    if not asked or find_tracer() is not None:
        yield
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import set_tracer_provider

        exporters = [_exporter(name, environ) for name in asked]
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the environment asks for traces (OTEL_…), and {error.name} is not installed; run: "
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
        # A collector that does not answer must not keep the server from stopping.
        flushing = threading.Thread(target=provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


def _exporter(name: str, environ: Mapping[str, str]) -> SpanExporter:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)  # stdout says where the server is, and nothing else
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), HTTP)
    if protocol != HTTP:
        raise SetupError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; this server sends its traces by {HTTP} only "
            "(collectors take it on port 4318)."
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
