"""Streams against scripted servers: what is repeated, what is an error, and what happens without streaming."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import ScriptedServer, over_http
from tests.unit.transport.tls import certificates, secure
from tinkex import Config, types
from tinkex.clients.sampling import RetryConfig, SamplingClient
from tinkex.clients.service import ServiceClient
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    ClosedError,
    NotFoundError,
    RequestFailedError,
    StreamInterruptedError,
)
from tinkex.observability.events import Event, RetryScheduled, SamplingPaused, StreamingUnavailable
from tinkex.testing import Reply, Request, reply

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4)
QUICK = RetryConfig(retry_delay_base=0.01, retry_delay_max=0.02)

ACCEPTED = ("accepted", {"request_id": "r1", "sample_sequence_ids": ["a"]})
DONE = ("done", {"stop_reasons": ["length"], "num_tokens": 2, "num_prompt_tokens": 3})
DONE_AT_ONE = ("done", {"stop_reasons": ["length"], "num_tokens": 1, "num_prompt_tokens": 3})


def token(index: int) -> tuple[str, dict[str, Any]]:
    return "token", {"sample": 0, "index": index, "token": 10 + index, "logprob": -0.5, "text": f"t{index}"}


def sse_reply(*events: tuple[str, Any]) -> Reply:
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    return Reply(200, {"content-type": "text/event-stream"}, body.encode())


class StreamingServer(ScriptedServer):
    """Answers streams with what it was given, one after the other, the last for all further ones."""

    def __init__(self, *answers: Reply) -> None:
        super().__init__()
        self.streams = list(answers)

    def on_stream_sample(self, value: types.SampleRequest, request: Request) -> Reply:
        return self.streams.pop(0) if len(self.streams) > 1 else self.streams[0]


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def notified() -> RecordingSink:
    return RecordingSink()


def sampler_of(server: ScriptedServer, notified: RecordingSink, retry: RetryConfig = QUICK) -> SamplingClient:
    service = ServiceClient(transport=server.transport, events=notified)
    return service.create_sampling_client(base_model="toy", retry_config=retry)


def test_events_are_typed_and_end_with_the_totals(notified: RecordingSink) -> None:
    sampler = sampler_of(StreamingServer(sse_reply(ACCEPTED, token(0), token(1), DONE)), notified)
    stream = sampler.sample_stream(PROMPT, 1, PARAMS)
    first, second, done = stream
    assert first == types.SampledToken(sample=0, index=0, token=10, logprob=-0.5, text="t0")
    assert isinstance(second, types.SampledToken)
    assert done == types.SampleStreamDone(stop_reasons=["length"], num_tokens=2, num_prompt_tokens=3)
    assert stream.request_id == "r1"
    assert stream.received == (first, second)


@pytest.mark.parametrize("failure", [reply({"detail": "down"}, 503), sse_reply(ACCEPTED), sse_reply()])
def test_a_failure_before_the_first_token_is_tried_again_as_a_new_sample(
    failure: Reply, notified: RecordingSink
) -> None:
    server = StreamingServer(failure, sse_reply(ACCEPTED, token(0), DONE_AT_ONE))
    assert len(list(sampler_of(server, notified).sample_stream(PROMPT, 1, PARAMS))) == 2
    assert [value.seq_id for value in server.values("stream_sample")] == [0, 1]


def test_a_stream_that_breaks_off_is_an_error_with_what_was_received(notified: RecordingSink) -> None:
    server = StreamingServer(sse_reply(ACCEPTED, token(0), token(1)))
    stream = sampler_of(server, notified).sample_stream(PROMPT, 1, PARAMS)
    with pytest.raises(StreamInterruptedError, match="after 2 tokens") as caught:
        list(stream)
    assert [event.token for event in caught.value.received] == [10, 11]
    assert isinstance(caught.value, APIConnectionError)
    assert len(server.values("stream_sample")) == 1, "tokens that were handed out are not drawn again"
    assert list(stream) == []


def test_a_stream_tries_again_what_its_settings_name(notified: RecordingSink) -> None:
    error = ("error", {"error": "the batch went wrong", "category": "server"})
    server = StreamingServer(sse_reply(ACCEPTED, error), sse_reply(ACCEPTED, token(0), DONE_AT_ONE))
    named = replace(QUICK, retryable_exceptions=(RequestFailedError,))
    assert len(list(sampler_of(server, notified, named).sample_stream(PROMPT, 1, PARAMS))) == 2
    with pytest.raises(APIConnectionError):
        next(
            sampler_of(StreamingServer(sse_reply(ACCEPTED)), notified, named).sample_stream(PROMPT, 1, PARAMS)
        )


def test_without_retries_the_first_failure_is_raised(notified: RecordingSink) -> None:
    sampler = sampler_of(
        StreamingServer(sse_reply(ACCEPTED)), notified, RetryConfig(enable_retry_logic=False)
    )
    with pytest.raises(APIConnectionError, match="before the end of the sample"):
        next(sampler.sample_stream(PROMPT, 1, PARAMS))


def test_a_sample_that_fails_on_the_server_says_why(notified: RecordingSink) -> None:
    error = ("error", {"error": "logits are not finite", "category": "user"})
    sampler = sampler_of(StreamingServer(sse_reply(ACCEPTED, token(0), error)), notified)
    with pytest.raises(RequestFailedError, match="not finite") as caught:
        list(sampler.sample_stream(PROMPT, 1, PARAMS))
    assert (caught.value.request_id, caught.value.category) == ("r1", "user")


def test_events_before_an_error_are_returned_first(notified: RecordingSink) -> None:
    """However the server's words are cut: tokens and the error may come in one piece."""
    error = ("error", {"error": "out of memory", "category": "server"})
    stream = sampler_of(
        StreamingServer(sse_reply(ACCEPTED, token(0), token(1), error)), notified
    ).sample_stream(PROMPT, 1, PARAMS)
    assert [next(stream), next(stream)] == list(stream.received)
    with pytest.raises(RequestFailedError, match="after 2 tokens: out of memory"):
        next(stream)
    assert list(stream) == []


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([token(0), token(2)], "token 2 of sample 0 instead of token 1"),
        ([token(0), token(0)], "token 0 of sample 0 instead of token 1"),
        ([token(0), token(1), token(0)], "token 0 of sample 0 instead of token 2"),
        ([("token", {**token(0)[1], "sample": 7})], "a token of sample 7, but there are 1"),
        ([("token", {**token(0)[1], "sample": -1})], "a token of sample -1"),
        ([token(0), DONE], "1 tokens of 1 samples arrived"),
        ([token(0), ("done", {**DONE_AT_ONE[1], "stop_reasons": []})], "1 of 0"),
        ([token(0), ("error", ["no", "object"])], "an error that is not an object"),
        ([("error", "words")], "an error that is not an object"),
    ],
    ids=range(9),
)
def test_a_stream_that_skips_repeats_or_mixes_tokens_is_an_error(
    events: list[tuple[str, Any]], said: str, notified: RecordingSink
) -> None:
    stream = sampler_of(StreamingServer(sse_reply(ACCEPTED, *events)), notified).sample_stream(
        PROMPT, 1, PARAMS
    )
    with pytest.raises(APIResponseValidationError, match=said):
        list(stream)
    assert [event.index for event in stream.received] == [*range(len(stream.received))]


def test_an_error_without_a_reason_is_an_error_of_its_own_kind_too(notified: RecordingSink) -> None:
    sampler = sampler_of(StreamingServer(sse_reply(ACCEPTED, ("error", {}))), notified)
    with pytest.raises(RequestFailedError, match="no reason given"):
        list(sampler.sample_stream(PROMPT, 1, PARAMS))


def test_nothing_that_follows_the_end_is_read(notified: RecordingSink) -> None:
    words = sse_reply(ACCEPTED, token(0), DONE_AT_ONE, token(0), ("error", {"error": "too late"}))
    events = list(sampler_of(StreamingServer(words), notified).sample_stream(PROMPT, 1, PARAMS))
    assert [type(event) for event in events] == [types.SampledToken, types.SampleStreamDone]


def test_characters_may_be_cut_anywhere_and_bytes_that_are_none_are_an_error(notified: RecordingSink) -> None:
    text = "ein Süßwasserfisch 🐟"
    body = sse_reply(("token", {**token(0)[1], "text": text}), DONE_AT_ONE).body
    body = body.replace(json.dumps(text).encode(), json.dumps(text, ensure_ascii=False).encode())

    class Cut:
        """A transport whose replies come byte by byte."""

        def __init__(self, server: ScriptedServer, body: bytes) -> None:
            self._server, self._body = server, body

        async def send(self, request: Request) -> Reply:
            return await self._server.transport.send(request)

        async def stream(self, request: Request) -> Any:
            return Pieces([self._body[n : n + 1] for n in range(len(self._body))])

        async def close(self) -> None:
            pass

    class Pieces:
        status, headers = 200, {"content-type": "text/event-stream"}

        def __init__(self, pieces: list[bytes]) -> None:
            self._pieces = pieces

        async def read(self) -> bytes:
            return self._pieces.pop(0) if self._pieces else b""

        async def close(self) -> None:
            pass

    with ServiceClient(transport=Cut(ScriptedServer(), body)) as service:
        first, _ = service.create_sampling_client(base_model="toy").sample_stream(PROMPT, 1, PARAMS)
        assert isinstance(first, types.SampledToken)
        assert first.text == text
    broken = body.replace("🐟".encode(), b"\xf0\x9f\x90")
    with ServiceClient(transport=Cut(ScriptedServer(), broken)) as service:
        sampler = service.create_sampling_client(base_model="toy", retry_config=QUICK)
        with pytest.raises(APIResponseValidationError, match="protocol"):
            list(sampler.sample_stream(PROMPT, 1, PARAMS))


class Waiting(StreamingServer):
    """Begins a stream only when the test says so."""

    def __init__(self, *answers: Reply) -> None:
        super().__init__(*answers)
        self.asked = threading.Event()
        self.may_answer = threading.Event()

    async def on_stream_sample(self, value: types.SampleRequest, request: Request) -> Reply:  # type: ignore[override]
        self.asked.set()
        await asyncio.to_thread(self.may_answer.wait, 20)
        return self.streams[0]


@pytest.mark.parametrize("answer", [sse_reply(ACCEPTED), reply({"detail": "down"}, 503), sse_reply(token(0))])
def test_a_stream_that_is_closed_while_it_is_waited_for_ends_and_is_not_begun_again(
    answer: Reply, notified: RecordingSink
) -> None:
    server = Waiting(answer)
    sampler = sampler_of(server, notified, replace(QUICK, max_connections=1))
    stream = sampler.sample_stream(PROMPT, 1, PARAMS)
    got: list[Any] = []
    reading = threading.Thread(target=lambda: got.extend(stream))
    reading.start()
    assert server.asked.wait(20)
    stream.close()
    server.may_answer.set()
    reading.join(20)
    assert not reading.is_alive()
    assert got == []
    assert len(server.values("stream_sample")) == 1
    server.streams = [sse_reply(ACCEPTED, token(0), DONE_AT_ONE)]
    assert len(list(sampler.sample_stream(PROMPT, 1, PARAMS))) == 2, "its place came free"


@pytest.mark.parametrize("held_by", ["the limiter", "another stream", "the pause before another try"])
def test_closing_a_stream_that_is_held_back_wakes_its_reader_and_sends_nothing(
    held_by: str, notified: RecordingSink
) -> None:
    good = sse_reply(ACCEPTED, token(0), token(1))
    answer = {
        "the limiter": reply({"detail": "later"}, 429, headers={"retry-after": "3600"}),
        "another stream": good,
        "the pause before another try": reply({"detail": "down"}, 503, headers={"retry-after": "3600"}),
    }[held_by]
    retry = RetryConfig(max_connections=1, retry_delay_base=3600, retry_delay_max=3600)
    server = StreamingServer(answer)
    sampler = sampler_of(server, notified, retry)
    first = sampler.sample_stream(PROMPT, 1, PARAMS)
    if held_by == "another stream":
        next(first)  # has the only place
    stream = sampler.sample_stream(PROMPT, 1, PARAMS) if held_by == "another stream" else first
    got: list[Any] = []
    started = threading.Event()

    def read() -> None:
        started.set()
        got.extend(stream)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    assert started.wait(30)
    while held_by != "another stream" and not any(
        isinstance(event, SamplingPaused | RetryScheduled) for event in notified.events
    ):
        time.sleep(0.005)
    sent = len(server.values("stream_sample"))
    stream.close()
    reading.join(30)
    assert not reading.is_alive()
    assert got == []
    assert len(server.values("stream_sample")) == sent
    first.close()
    if held_by != "the limiter":  # which holds back every stream
        server.streams = [good]
        assert next(sampler.sample_stream(PROMPT, 1, PARAMS)), "its place came free"


def test_what_is_not_a_stream_is_a_protocol_error(notified: RecordingSink) -> None:
    nonsense = Reply(200, {}, b"event: token\ndata: {]\n\n")
    with pytest.raises(APIResponseValidationError, match="protocol"):
        list(sampler_of(StreamingServer(nonsense), notified).sample_stream(PROMPT, 1, PARAMS))


@pytest.mark.parametrize("status", [404, 405, 501])
def test_without_streaming_on_the_server_the_sample_comes_whole_and_streamed_is_false(
    status: int, notified: RecordingSink
) -> None:
    sampler = sampler_of(StreamingServer(reply({"detail": "no such endpoint"}, status)), notified)
    stream = sampler.sample_stream(PROMPT, 2, PARAMS)
    events = list(stream)
    assert not stream.streamed
    assert [e.token for e in events if isinstance(e, types.SampledToken)] == [1, 2, 3, 1, 2, 3]
    assert {e.text for e in events if isinstance(e, types.SampledToken)} == {None}
    done = events[-1]
    assert isinstance(done, types.SampleStreamDone)
    assert not done.streamed
    assert [e for e in notified.events if isinstance(e, StreamingUnavailable)] == [
        StreamingUnavailable("sess-1:sample:0", status)
    ]


def test_a_sampler_that_is_gone_is_not_mistaken_for_missing_streaming(notified: RecordingSink) -> None:
    class Gone(StreamingServer):
        def on_asample(self, value: types.SampleRequest, request: Request) -> Reply:
            return reply({"detail": "no such sampler"}, 404)

    with pytest.raises(NotFoundError, match="no such sampler"):
        list(
            sampler_of(Gone(reply({"detail": "no such sampler"}, 404)), notified).sample_stream(
                PROMPT, 1, PARAMS
            )
        )
    assert not [e for e in notified.events if isinstance(e, StreamingUnavailable)]


@pytest.mark.slow
def test_a_429_pauses_and_resubmits_the_same_sample(notified: RecordingSink) -> None:
    busy = reply({"detail": "slow down"}, 429)
    server = StreamingServer(busy, sse_reply(ACCEPTED, token(0), DONE_AT_ONE))
    assert len(list(sampler_of(server, notified).sample_stream(PROMPT, 1, PARAMS))) == 2
    assert [value.seq_id for value in server.values("stream_sample")] == [0, 0]


@pytest.mark.slow
def test_slots_are_released_however_streams_end(notified: RecordingSink) -> None:
    server = StreamingServer(sse_reply(ACCEPTED, token(0), token(1)))
    sampler = sampler_of(server, notified, RetryConfig(max_connections=1, enable_retry_logic=False))
    with sampler.sample_stream(PROMPT, 1, PARAMS) as closed:
        next(closed)
    with pytest.raises(StreamInterruptedError):
        list(sampler.sample_stream(PROMPT, 1, PARAMS))
    forgotten = sampler.sample_stream(PROMPT, 1, PARAMS)
    next(forgotten)
    del forgotten
    gc.collect()
    next(sampler.sample_stream(PROMPT, 1, PARAMS))


def test_a_closed_client_streams_no_more(notified: RecordingSink) -> None:
    server = StreamingServer(sse_reply(ACCEPTED, token(0), DONE_AT_ONE))
    service = ServiceClient(transport=server.transport, events=notified)
    sampler = service.create_sampling_client(base_model="toy")
    stream = sampler.sample_stream(PROMPT, 1, PARAMS)
    service.close("success")
    with pytest.raises(ClosedError):
        next(stream)
    with pytest.raises(ClosedError):
        sampler.sample_stream(PROMPT, 1, PARAMS)


@pytest.fixture
def address(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Config]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    server = StreamingServer(sse_reply(ACCEPTED, token(0), token(1), DONE))
    if request.param == "http":
        with over_http(server) as url:
            yield Config(api_key="tml-test", base_url=url)
    else:
        files = certificates(tmp_path)
        with secure(server, files) as secured:
            yield Config(api_key="tml-test", base_url=secured.url, ca_file=files.authority)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["http", "https"], indirect=True)
def test_streams_run_over_a_socket_with_and_without_tls(address: Config) -> None:
    with ServiceClient(config=address) as service:
        sampler = service.create_sampling_client(base_model="toy", retry_config=QUICK)
        assert len(list(sampler.sample_stream(PROMPT, 1, PARAMS))) == 3
        with sampler.sample_stream(PROMPT, 1, PARAMS) as stream:
            next(stream)
