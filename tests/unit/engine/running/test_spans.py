"""Spans of operations in the engine: what waits, what runs, and what shares a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import StatusCode, set_span_in_context

from tests.traces import Traces, traced
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running import spans
from tinkex.engine.running.budgets import Budgets
from tinkex.engine.running.spans import call_context
from tinkex.engine.running.table import OperationTable
from tinkex.engine.store import Outcome, ResultFormat

DONE = Outcome.done(b"result", ResultFormat.JSON)
FAILED = Outcome.failed("the words were: private", "user")


@pytest.fixture
def traces() -> Iterator[Traces]:
    with traced() as found:
        yield found


@pytest.fixture
def table() -> OperationTable:
    return OperationTable(gap_timeout_s=300, budgets=Budgets(), on_ready=lambda: None)


@contextmanager
def call_of(traces: Traces, name: str) -> Iterator[None]:
    """A call that is being served, with a trace of its own."""
    span = traces.program.start_span(name, Context())
    held = call_context.set(set_span_in_context(span, Context()))
    try:
        yield
    finally:
        call_context.reset(held)
        span.end()


def operation(run_id: str, seq_id: int, kind: Kind, num_tokens: int = 10) -> Operation:
    return Operation(f"{run_id}-{seq_id}", run_id, "base", run_id, seq_id, kind, num_tokens)


def opened(table: OperationTable, *run_ids: str) -> None:
    for run_id in run_ids:
        create = operation(run_id, 0, Kind.CREATE, 0)
        table.add(create, 0.0)
        table.next_turns(100, lane="lane-0")
        table.end(table.compute([create], DONE))


def end(table: OperationTable, request_id: str, outcome: Outcome = DONE) -> None:
    (ended,) = [each for each in table.unfinished() if each.request_id == request_id]
    table.compute([ended], outcome)
    spans.ended([ended])
    assert ended.trace is None, "nothing is kept of it"
    table.end([ended])


def test_an_operation_waits_and_runs_in_the_trace_of_its_call(traces: Traces, table: OperationTable) -> None:
    opened(table, "ada")
    with call_of(traces, "call"):
        table.add(operation("ada", 1, Kind.OPTIM_STEP, 0), 0.0)
    assert traces.names == ["call"]
    table.next_turns(100, lane="lane-0")
    waited = traces.one("tinkex.queue")
    assert waited in traces.inside(traces.one("call"))
    assert "tinkex.engine.optim_step" not in traces.names
    end(table, "ada-1")
    ran = traces.one("tinkex.engine.optim_step")
    assert ran in traces.inside(traces.one("call"))
    assert ran.links == ()
    assert dict(ran.attributes or {}) == {
        "tinkex.operation": "optim_step",
        "tinkex.request_id": "ada-1",
        "tinkex.model_id": "ada",
        "tinkex.seq_id": 1,
        "tinkex.num_tokens": 0,
        "tinkex.batch.num_operations": 1,
        "tinkex.batch.num_tokens": 0,
        "tinkex.ran": True,
        "tinkex.result_bytes": 6,
        "tinkex.tokens_computed": 0,
    }


def test_operations_that_share_a_pass_have_a_span_each_and_point_to_the_pass(
    traces: Traces, table: OperationTable
) -> None:
    opened(table, "ada", "bob", "eve")
    for run_id, tokens in (("ada", 10), ("bob", 20)):
        with call_of(traces, f"call of {run_id}"):
            table.add(operation(run_id, 1, Kind.FORWARD_BACKWARD, tokens), 0.0)
    table.add(operation("eve", 1, Kind.FORWARD_BACKWARD, 5), 0.0)  # her client traces nothing
    table.next_turns(100, lane="lane-0")
    end(table, "ada-1")
    end(table, "eve-1")
    assert "tinkex.engine.pass" not in traces.names
    end(table, "bob-1", FAILED)
    shared = traces.one("tinkex.engine.pass")
    assert shared.parent is None
    assert dict(shared.attributes or {}) == {
        "tinkex.batch.num_operations": 3,
        "tinkex.batch.num_tokens": 35,
    }
    calls = {traces.one(f"call of {name}").context.span_id for name in ("ada", "bob")}
    assert {link.context.span_id for link in shared.links} == calls
    runs = traces.all("tinkex.engine.forward_backward")
    assert [run.links[0].context.span_id for run in runs] == [shared.context.span_id] * 2
    assert {run.context.trace_id for run in runs} == {
        traces.trace_of("call of ada"),
        traces.trace_of("call of bob"),
    }
    assert [run.status.status_code for run in runs] == [StatusCode.UNSET, StatusCode.ERROR]
    assert dict(runs[1].attributes or {})["error.type"] == "user"
    assert "private" not in traces.text()


def test_a_sample_runs_from_when_it_joins_the_batch(traces: Traces, table: OperationTable) -> None:
    with call_of(traces, "call"):
        table.add(operation("sampler", 0, Kind.SAMPLE), 0.0)
    assert table.start_sample("lane-0", "base") is not None
    end(table, "sampler-0")
    assert traces.names == ["call", "tinkex.queue", "tinkex.engine.sample"]


def test_what_never_runs_ends_its_wait_with_the_reason(traces: Traces, table: OperationTable) -> None:
    opened(table, "ada")
    with call_of(traces, "call"):
        table.add(operation("ada", 3, Kind.OPTIM_STEP), 0.0)
    assert table.expire_gaps(1000.0)
    end(table, "ada-3", FAILED)
    waited = traces.one("tinkex.queue")
    assert waited.status.status_code is StatusCode.ERROR
    assert dict(waited.attributes or {})["tinkex.ran"] is False


def test_operations_of_calls_that_are_not_traced_have_no_spans_and_none_are_kept(
    traces: Traces, table: OperationTable
) -> None:
    opened(table, "ada")
    with traces.program.start_as_current_span("of somebody else"):
        table.add(operation("ada", 1, Kind.OPTIM_STEP), 0.0)
    table.next_turns(100, lane="lane-0")
    end(table, "ada-1")
    assert traces.names == ["of somebody else"]
    with call_of(traces, "call"):
        table.add(operation("ada", 2, Kind.OPTIM_STEP), 0.0)
    table.next_turns(100, lane="lane-0")
    end(table, "ada-2")


def test_an_engine_that_stops_ends_the_spans_of_what_it_leaves(traces: Traces, table: OperationTable) -> None:
    opened(table, "ada", "bob")
    for run_id in ("ada", "bob"):
        with call_of(traces, "call"):
            table.add(operation(run_id, 1, Kind.FORWARD_BACKWARD), 0.0)
            table.add(operation(run_id, 2, Kind.OPTIM_STEP), 0.0)
    table.next_turns(100, lane="lane-0")
    spans.abandoned(table.unfinished())
    assert all(each.trace is None for each in table.unfinished())
    runs = traces.all("tinkex.engine.forward_backward")
    waits = [span for span in traces.all("tinkex.queue") if "tinkex.unfinished" in (span.attributes or {})]
    assert (len(runs), len(waits), len(traces.all("tinkex.engine.pass"))) == (2, 2, 1)
    assert all(dict(span.attributes or {})["tinkex.unfinished"] for span in runs)


def test_span_processors_that_fail_do_not_stop_the_engine(table: OperationTable) -> None:
    class Broken(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            raise RuntimeError("broken")

    opened(table, "ada")
    with traced() as traces:
        with call_of(traces, "call"):
            traces.provider.add_span_processor(Broken())
            table.add(operation("ada", 1, Kind.OPTIM_STEP), 0.0)
            assert table.next_turns(100, lane="lane-0")
        end(table, "ada-1")
