"""A collector of OpenTelemetry traces, as small as it can be: it takes what servers export over HTTP, and remembers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.http_server import Handler, listening


@dataclass(frozen=True)
class Exported:
    """A span as it arrived."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    failed: bool
    facts: Mapping[str, Any]
    service: str


@dataclass
class Collector:
    """What came so far."""

    url: str = ""
    spans: list[Exported] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, str]:
        """The variables that make a process export to here, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.bodies.append(body)
        for resource in request.resource_spans:
            service = _facts(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [
                    Exported(
                        span.name,
                        int.from_bytes(span.trace_id, "big"),
                        int.from_bytes(span.span_id, "big"),
                        int.from_bytes(span.parent_span_id, "big"),
                        span.status.code == 2,
                        _facts(span.attributes),
                        service,
                    )
                    for span in scope.spans
                ]


def _facts(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector behind a socket, for the block."""
    collector = Collector()

    class TracesHandler(Handler):
        protocol_version = "HTTP/1.0"  # exporters open a connection for each batch

        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

    with listening(TracesHandler) as collector.url:
        yield collector
