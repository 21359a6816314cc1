"""Server spans: their trace and their status."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry.trace import SpanKind, StatusCode
from starlette.requests import Request
from starlette.responses import Response

from tests.traces import Traces, traced
from tinkex._wire.endpoints import endpoint
from tinkex.engine.api.spans import CallTracing
from tinkex.engine.running.spans import call_context

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"


@pytest.fixture
def traces() -> Iterator[Traces]:
    with traced() as found:
        yield found


def request(*, header: str | None = TRACEPARENT, remote: bool = True) -> Request:
    headers = [(b"x-api-key", b"tml-canary")]
    if header is not None:
        headers.append((b"traceparent", header.encode()))
    return Request(
        {
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "path": "/api/v1/optim_step",
            "query_string": b"token=canary",
            "headers": headers,
            "client": ("127.0.0.1", 5000) if remote else None,
            "server": ("127.0.0.1", 8787),
        }
    )


async def respond(status: int = 200) -> Response:
    return Response(status_code=status)


async def trace(request: Request, name: str = "optim_step", status: int = 200) -> Response:
    return await CallTracing().trace(respond(status), endpoint(name), request, "call-1")


async def test_a_span_continues_the_trace_of_the_headers(traces: Traces) -> None:
    await trace(request())
    span = traces.one("POST /api/v1/optim_step")
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, PARENT_ID)
    assert span.kind is SpanKind.SERVER
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/api/v1/optim_step",
        "url.scheme": "http",
        "tinkex.call_id": "call-1",
        "http.response.status_code": 200,
    }
    assert "canary" not in traces.text()


async def test_spans_are_named_by_route_templates(traces: Traces) -> None:
    await trace(request(), "publish_checkpoint")
    assert traces.names == [
        "POST /api/v1/training_runs/{training_run_id}/checkpoints/{checkpoint_id}/publish"
    ]


@pytest.mark.parametrize("header", [None, "", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_remote_request_without_a_trace_starts_one(header: str | None, traces: Traces) -> None:
    await trace(request(header=header))
    assert traces.one("POST /api/v1/optim_step").parent is None
    traces.clear()
    await trace(request(header=header, remote=False))
    for name in ("session_heartbeat", "retrieve_future", "healthz"):
        await trace(request(header=header), name)
    assert traces.names == []


async def test_submitted_operations_continue_the_span(traces: Traces) -> None:
    async def submit() -> Response:
        context = call_context.get()
        assert context is not None
        traces.program.start_span("queued", context).end()
        traces.program.start_span("logged").end()
        return Response()

    await CallTracing().trace(submit(), endpoint("optim_step"), request(), "call-1")
    inside = traces.inside(traces.one("POST /api/v1/optim_step"))
    assert [span.name for span in inside] == ["queued", "logged"]
    assert call_context.get() is None


async def test_only_5xx_responses_are_span_errors(traces: Traces) -> None:
    for status in (404, 500):
        await trace(request(), status=status)
    rejected, failed = traces.all("POST /api/v1/optim_step")
    assert rejected.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR
    assert dict(failed.attributes or {})["error.type"] == "500"


async def test_a_cancelled_request_ends_its_span(traces: Traces) -> None:
    async def hang() -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    response = CallTracing().trace(hang(), endpoint("retrieve_future"), request(), "call-1")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(response, 0.01)
    assert dict(traces.one("POST /api/v1/retrieve_future").attributes or {})["tinkex.cancelled"] is True


async def test_tracing_can_be_disabled(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_TRACING", "off")
    assert (await trace(request())).status_code == 200
    assert traces.names == []


async def test_without_a_provider_the_response_is_unchanged() -> None:
    assert (await trace(request())).status_code == 200
