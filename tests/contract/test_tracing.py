"""One trace from user code to the optimizer's step, on the engine in this process and on a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan

import tinkex
from tests.collector import Exported, collecting
from tests.contract.names import BASE_MODEL
from tests.contract.test_training import datum
from tests.servers import serve
from tests.traces import Traces, traced
from tinkex import types
from tinkex._transport.local import LocalTransport

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = types.SamplingParams(max_tokens=3)


@pytest.fixture
def traces() -> Iterator[Traces]:
    with traced() as found:
        yield found


@pytest.fixture
def embedded(embedded_home: Path, tiny_model: Path) -> Iterator[tinkex.ServiceClient]:
    transport = LocalTransport(embedded_home, {BASE_MODEL: str(tiny_model)})
    with tinkex.ServiceClient(base_url="local", transport=transport) as service:
        yield service


def way_up(traces: Traces, span: ReadableSpan) -> list[str]:
    """The names of a span and of all that it is inside of."""
    names = [span.name]
    while span.parent is not None:
        (span,) = [each for each in traces.spans if each.context.span_id == span.parent.span_id]
        names.append(span.name)
    return names


def test_one_trace_leads_from_user_code_to_the_step_of_the_embedded_engine(
    embedded: tinkex.ServiceClient, traces: Traces
) -> None:
    training = embedded.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    with traces.program.start_as_current_span("my training loop"):
        training.forward_backward([datum(4), datum(6)], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    for kind in ("forward_backward", "optim_step"):
        assert way_up(traces, traces.one(f"tinkex.engine.{kind}")) == [
            f"tinkex.engine.{kind}",
            f"POST /api/v1/{kind}",
            f"POST /api/v1/{kind}",
            f"tinkex.{kind}",
            "my training loop",
        ]
    step = traces.one("tinkex.engine.optim_step")
    (waited,) = [
        span
        for span in traces.all("tinkex.queue")
        if dict(span.attributes or {})["tinkex.operation"] == "optim_step"
    ]
    assert waited.parent == step.parent
    assert (waited.end_time or 0) <= (step.start_time or 0)
    facts = dict(traces.one("tinkex.engine.forward_backward").attributes or {})
    assert facts["tinkex.num_tokens"] == facts["tinkex.batch.num_tokens"] == 10
    assert facts["tinkex.model_id"] == training.model_id
    assert facts["tinkex.seq_id"] == 1
    request_ids = dict(traces.one("tinkex.forward_backward").attributes or {})["tinkex.request_ids"]
    assert (facts["tinkex.request_id"],) == request_ids
    # The poll for the result is in the same trace, too.
    polls = [span for span in traces.spans if span.name == "POST /api/v1/retrieve_future"]
    assert traces.trace_of("my training loop") in {poll.context.trace_id for poll in polls}


def test_threads_and_tasks_each_have_their_own_trace_down_to_the_engine(
    embedded: tinkex.ServiceClient, traces: Traces
) -> None:
    training = embedded.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    sampler = training.save_weights_and_get_sampling_client()
    traces.clear()

    def train(number: int) -> None:
        with traces.program.start_as_current_span(f"thread {number}"):
            training.forward_backward([datum(number + 1)], "cross_entropy").result()

    async def sample(number: int) -> None:
        with traces.program.start_as_current_span(f"task {number}"):
            await sampler.sample_async(PROMPT, 1, PARAMS)

    async def sample_all() -> None:
        await asyncio.gather(*(sample(number) for number in range(3)))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))
    asyncio.run(sample_all())
    for who, kind in (("thread", "forward_backward"), ("task", "sample")):
        roots = {way_up(traces, span)[-1] for span in traces.all(f"tinkex.engine.{kind}")}
        assert roots == {f"{who} {number}" for number in range(3)}
    for number in range(3):
        trace_id = traces.trace_of(f"thread {number}")
        (run,) = [s for s in traces.all("tinkex.engine.forward_backward") if s.context.trace_id == trace_id]
        assert dict(run.attributes or {})["tinkex.num_tokens"] == number + 1


def test_streams_saves_and_rejections_are_traced_to_their_end(
    embedded: tinkex.ServiceClient, traces: Traces
) -> None:
    training = embedded.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
    sampler = training.save_weights_and_get_sampling_client()
    list(sampler.sample_stream(PROMPT, 1, PARAMS))
    assert way_up(traces, traces.one("tinkex.engine.sample"))[-1] == "tinkex.sample_stream"
    training.save_state("traced").result()
    saved = traces.one("tinkex.engine.save_weights")
    assert way_up(traces, saved)[-1] == "tinkex.save_state"
    with pytest.raises(tinkex.TinkexError):
        training.save_state("traced").result()
    assert [span.status.status_code.name for span in traces.all("tinkex.save_state")] == ["UNSET", "ERROR"]


def test_without_the_clients_tracing_the_engine_in_its_process_begins_no_trace(
    embedded_home: Path, tiny_model: Path, traces: Traces
) -> None:
    transport = LocalTransport(embedded_home, {BASE_MODEL: str(tiny_model)})
    config = tinkex.Config(base_url="local", tracing=False)
    with (
        traces.program.start_as_current_span("user code"),
        tinkex.ServiceClient(config=config, transport=transport) as service,
    ):
        service.create_sampling_client(base_model=BASE_MODEL).sample(PROMPT, 1, PARAMS).result()
    assert traces.names == ["user code"]


# ---- a server


@pytest.mark.slow
def test_one_trace_leads_from_user_code_through_a_server_to_its_engine(
    traces: Traces, tiny_model: Path, tmp_path: Path
) -> None:
    with collecting() as collector:
        settings = {**collector.settings, "OTEL_SERVICE_NAME": "my-server"}
        with serve(tmp_path, "--model", f"{BASE_MODEL}={tiny_model}", env=settings) as server:
            with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
                training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
                with traces.program.start_as_current_span("my training loop"):
                    training.forward_backward([datum(4)], "cross_entropy").result()
                    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
                sampler = training.save_weights_and_get_sampling_client()
                with traces.program.start_as_current_span("my sample"):
                    sampler.sample(PROMPT, 1, PARAMS).result()
            untraced = tinkex.Config(base_url=server.url, api_key=server.key, tracing=False)
            with tinkex.ServiceClient(config=untraced) as service:
                service.create_sampling_client(base_model=BASE_MODEL).sample(PROMPT, 1, PARAMS).result()
    by_id = {span.span_id: span for span in collector.spans}

    def found(name: str, trace_id: int) -> Exported:
        (span,) = [span for span in collector.spans if (span.name, span.trace_id) == (name, trace_id)]
        return span

    loop = traces.trace_of("my training loop")
    for kind in ("forward_backward", "optim_step"):
        run = found(f"tinkex.engine.{kind}", loop)
        call = by_id[run.parent_id]
        assert call.name == f"POST /api/v1/{kind}"
        attempt = next(
            span for span in traces.all(f"POST /api/v1/{kind}") if span.context.span_id == call.parent_id
        )
        assert attempt.context.trace_id == loop
        assert run.facts["tinkex.model_id"] == training.model_id
        assert not run.failed
    sample = found("tinkex.engine.sample", traces.trace_of("my sample"))
    assert by_id[sample.parent_id].facts["http.response.status_code"] == 200
    assert {span.service for span in collector.spans} == {"my-server"}
    # Requests of a client without tracing start a trace here, except for frequent ones.
    roots = {span.name for span in collector.spans if span.parent_id == 0}
    assert "POST /api/v1/asample" in roots
    assert not [name for name in roots if "retrieve" in name or "heartbeat" in name]
    assert server.key.encode() not in b"".join(collector.bodies)
