"""Streams of a real server through faulty networks, and servers that stop in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.contract.test_metrics import metrics_of
from tests.durability.killable import KillableServer
from tests.faults.faulty_proxy import (
    FaultyProxy,
    ProxyFault,
    between,
    buffers_everything,
    byte_by_byte,
    cuts_after,
    replies_with,
    resets_after,
    rewrites,
    stalls_after,
)
from tests.servers import ServedEngine
from tinkex import types
from tinkex.clients.retry_config import RetryConfig
from tinkex.testing import local_engine

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = types.SamplingParams(max_tokens=12, seed=7, stop=[])
LONG = types.SamplingParams(max_tokens=400, stop=[])
QUICK = RetryConfig(retry_delay_base=0.01, retry_delay_max=0.02)
SECOND_TOKEN = b'"index":1'
ACCEPTED = b"sample_sequence_ids"


@contextmanager
def sampler_behind(
    server: ServedEngine, fault: ProxyFault, times: int = 1_000_000, **settings: Any
) -> Iterator[tuple[tinkex.SamplingClient, FaultyProxy]]:
    with between(FaultyProxy(server.url, "/stream_sample", fault, times)) as proxy:
        config = tinkex.Config(base_url=proxy.url, api_key=server.key, **settings)
        with tinkex.ServiceClient(config=config) as service:
            yield service.create_sampling_client(base_model=MODEL, retry_config=QUICK), proxy


def tokens_of(events: list[Any]) -> list[int]:
    return [event.token for event in events if isinstance(event, types.SampledToken)]


@pytest.mark.slow
def test_single_byte_segments_and_buffered_responses_give_the_same_stream(
    served_engine: ServedEngine,
) -> None:
    streams = []
    for fault in (byte_by_byte, buffers_everything):
        with sampler_behind(served_engine, fault) as (sampler, proxy):
            stream = sampler.sample_stream(PROMPT, 2, PARAMS)
            streams.append(list(stream))
            assert stream.streamed
            assert proxy.struck == 1
            whole = sampler.sample(PROMPT, 2, PARAMS).result(60)
    first, second = streams
    for number in range(2):
        text = [
            [e.text for e in s if isinstance(e, types.SampledToken) and e.sample == number] for s in streams
        ]
        assert text[0] == text[1]
        mine = [e.token for e in first if isinstance(e, types.SampledToken) and e.sample == number]
        assert mine == whole.sequences[number].tokens
    assert len(first) == len(second) == 25


@pytest.mark.parametrize("cut", [cuts_after, resets_after], ids=["cut", "reset"])
def test_a_connection_lost_between_tokens_is_an_error_with_the_received_tokens(
    served_engine: ServedEngine, cut: Callable[[bytes], ProxyFault]
) -> None:
    with sampler_behind(served_engine, cut(b'"index":3')) as (sampler, proxy):
        stream = sampler.sample_stream(PROMPT, 1, LONG)
        with pytest.raises(tinkex.StreamInterruptedError) as caught:
            list(stream)
        assert proxy.struck == 1, "delivered tokens are not sampled again"
        assert tuple(caught.value.received) == tuple(stream.received)
        assert [token.index for token in stream.received] == [0, 1, 2]
        assert "the stream was interrupted after" in str(caught.value)
    nothing_is_sampled(served_engine)


def nothing_is_sampled(server: ServedEngine) -> None:
    """Waits until the server has cancelled the abandoned samples."""
    deadline = time.monotonic() + 60
    while True:
        page = metrics_of(server)
        under_way = [
            page[f'tinkex_operations{{kind="sample",state="{state}"}}'] for state in ("waiting", "running")
        ]
        if not any(under_way):
            return
        assert time.monotonic() < deadline, under_way
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [cuts_after(b"\r\n\r\n"), cuts_after(ACCEPTED), resets_after(b"\r\n\r\n")])
def test_a_connection_lost_before_the_first_token_is_retried(
    served_engine: ServedEngine, cut: ProxyFault
) -> None:
    with sampler_behind(served_engine, cut, times=2) as (sampler, proxy):
        events = list(sampler.sample_stream(PROMPT, 1, PARAMS))
        assert proxy.struck == 2
        assert len(tokens_of(events)) == 12
    nothing_is_sampled(served_engine)


@pytest.mark.slow
def test_a_stalled_stream_times_out(served_engine: ServedEngine) -> None:
    with sampler_behind(served_engine, stalls_after(SECOND_TOKEN), timeout=2.0) as (sampler, _):
        stream = sampler.sample_stream(PROMPT, 1, LONG)
        with pytest.raises(tinkex.StreamInterruptedError, match="sent nothing for 2 s"):
            list(stream)
    nothing_is_sampled(served_engine)


def without_the_end(body: bytes) -> bytes:
    return body[: body.index(b"event: done")]


def with_a_repeated_event(body: bytes) -> bytes:
    start = body.index(b"event: token")
    end = body.index(b"\n\n", start) + 2
    return body[:end] + body[start:end] + body[end:]


def with_garbage(body: bytes) -> bytes:
    return body.replace(b"event: done", b"event: token\ndata: {]\n\nevent: done")


def with_invalid_utf8(body: bytes) -> bytes:
    return body.replace(b'"text":"', b'"text":"\xff\xfe', 1)


def without_a_token(body: bytes) -> bytes:
    start = body.index(b"event: token")
    return body[:start] + body[body.index(b"\n\n", start) + 2 :]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (without_the_end, tinkex.StreamInterruptedError),
        (with_a_repeated_event, tinkex.APIResponseValidationError),
        (with_garbage, tinkex.APIResponseValidationError),
        (with_invalid_utf8, tinkex.APIResponseValidationError),
        (without_a_token, tinkex.APIResponseValidationError),
    ],
)
def test_a_modified_stream_is_never_accepted_as_complete(
    served_engine: ServedEngine, change: Callable[[bytes], bytes], kind: type[Exception]
) -> None:
    with sampler_behind(served_engine, rewrites(change)) as (sampler, proxy):
        with pytest.raises(kind):
            list(sampler.sample_stream(PROMPT, 1, PARAMS))
        assert proxy.struck == 1


def test_unknown_events_and_a_byte_order_mark_are_ignored(served_engine: ServedEngine) -> None:
    def more(body: bytes) -> bytes:
        events = b"\xef\xbb\xbf: hello\n\nevent: weather\ndata: sunny\n\nid: 7\nretry: 10\n\n"
        return events + body.replace(b"\n\n", b"\r\n\r\n")

    with sampler_behind(served_engine, rewrites(more)) as (sampler, _):
        stream = sampler.sample_stream(PROMPT, 1, PARAMS)
        assert len(list(stream)) == 13
        assert stream.request_id is not None


PORTAL = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 18\r\n\r\n<html>login</html>"


def test_an_html_page_in_place_of_a_stream_is_an_error_and_not_retried(
    served_engine: ServedEngine,
) -> None:
    with sampler_behind(served_engine, replies_with(PORTAL)) as (sampler, proxy):
        with pytest.raises(tinkex.APIResponseValidationError, match="text/html"):
            list(sampler.sample_stream(PROMPT, 1, PARAMS))
        assert proxy.struck == 1


# ---- servers that stop ----


@pytest.fixture
def killable(tiny_model: Path, tmp_path: Path) -> Iterator[KillableServer]:
    with KillableServer(tmp_path, tiny_model) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_server_that_stops_ends_the_stream_with_the_received_tokens(
    killable: KillableServer, how: str
) -> None:
    with tinkex.ServiceClient(base_url=killable.url, api_key=killable.key) as service:
        sampler = service.create_sampling_client(base_model=MODEL, retry_config=QUICK)
        # Much longer than the server takes to stop.
        stream = sampler.sample_stream(PROMPT, 1000, LONG)
        assert isinstance(next(stream), types.SampledToken)
        ending = threading.Thread(target=killable.stop if how == "stopped" else killable.kill)
        ending.start()
        with pytest.raises((tinkex.StreamInterruptedError, tinkex.RequestFailedError)):
            list(stream)
        assert stream.received
        ending.join()


@pytest.mark.slow
def test_closing_an_embedded_engine_ends_its_streams(tiny_model: Path) -> None:
    with local_engine(tiny_model) as engine:
        sampler = engine.service().create_sampling_client(base_model=engine.base_model, retry_config=QUICK)
        stream = sampler.sample_stream(PROMPT, 1000, LONG)
        assert isinstance(next(stream), types.SampledToken)
        engine.close()
        with pytest.raises(tinkex.TinkexError):
            list(stream)
