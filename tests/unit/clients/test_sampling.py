"""The sampling client: concurrency, backpressure, lost results, cancellation."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.scripted import ScriptedServer, over_http, sampled
from tinkex import types
from tinkex._runtime import background
from tinkex.clients.sampling import RetryConfig, SamplingClient
from tinkex.clients.service import ServiceClient
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    BadRequestError,
    ClosedError,
    InternalServerError,
    NotFoundError,
    RequestFailedError,
    ResultExpiredError,
    UnprocessableEntityError,
)
from tinkex.observability.events import Event, SamplingPaused
from tinkex.testing import Reply, Request, reply

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4)
QUICK = RetryConfig(retry_delay_base=0.01, retry_delay_max=0.02)


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def service(server: ScriptedServer) -> Iterator[ServiceClient]:
    with ServiceClient(transport=server.transport) as client:
        yield client


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="toy", retry_config=QUICK)


def test_a_sample_is_a_future_of_a_typed_response(sampler: SamplingClient) -> None:
    future = sampler.sample(PROMPT, 2, PARAMS)
    assert isinstance(future, concurrent.futures.Future)
    response = future.result(timeout=10)
    assert [s.tokens for s in response.sequences] == [[1, 2, 3], [1, 2, 3]]
    assert [s.sequence_id for s in response.sequences] == ["seq-0-0", "seq-0-1"]


def test_the_request_holds_every_option(server: ScriptedServer, sampler: SamplingClient) -> None:
    targets = types.TensorData.from_numpy(np.array([[1, -1], [2, 3]]))
    sampler.sample(PROMPT, 1, PARAMS, True, 2, 3, targets, 0, 2).result(timeout=10)  # noqa: FBT003
    request: types.SampleRequest = server.values("asample")[0]
    assert request.sampling_session_id == sampler._sampling_session_id == "sess-1:sample:0"
    assert (request.seq_id, request.num_samples, request.prompt) == (0, 1, PROMPT)
    assert (request.prompt_logprobs, request.topk_prompt_logprobs, request.topk_sample_logprobs) == (
        True,
        2,
        3,
    )
    assert request.target_prompt_logprobs is not None
    assert request.target_prompt_logprobs.tolist() == [[1, -1], [2, 3]]
    assert request.prompt_logprobs_last_n == 2
    headers = next(r.headers for r in server.transport.requests if r.path.endswith("asample"))
    assert headers["x-tinker-sampling-backpressure"] == "1"


def test_many_samples_from_many_threads_have_numbers_of_their_own(
    server: ScriptedServer, sampler: SamplingClient
) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [f.result() for f in [pool.submit(sampler.sample, PROMPT, 1, PARAMS) for _ in range(100)]]
    for future in futures:
        future.result(timeout=10)
    assert sorted(r.seq_id for r in server.values("asample")) == list(range(100))


def test_async_sampling_works_on_one_new_loop_after_another(sampler: SamplingClient) -> None:
    async def main() -> list[types.SampleResponse]:
        return list(await asyncio.gather(*(sampler.sample_async(PROMPT, 1, PARAMS) for _ in range(5))))

    for _ in range(3):
        assert len(asyncio.run(main())) == 5
    assert inspect.iscoroutinefunction(SamplingClient.sample_async)


def test_async_sampling_goes_through_sample(service: ServiceClient, sampler: SamplingClient) -> None:
    seen: list[int] = []

    class Captured(SamplingClient):
        def sample(self, *arguments: Any, **keywords: Any) -> Any:
            seen.append(1)
            return super().sample(*arguments, **keywords)

    captured = Captured(service.holder, background().run(service.holder.opened()), sampling_session_id="x")
    asyncio.run(captured.sample_async(PROMPT, num_samples=1, sampling_params=PARAMS))
    assert seen == [1]


def test_logprobs_of_a_prompt_begin_with_none(server: ScriptedServer, sampler: SamplingClient) -> None:
    assert sampler.compute_logprobs(PROMPT).result(timeout=10) == [None, -0.5, -0.5]
    assert asyncio.run(sampler.compute_logprobs_async(PROMPT, 1)) == [None, -0.5, -0.5]
    first, second = server.values("asample")
    assert (first.num_samples, first.sampling_params.max_tokens, first.prompt_logprobs) == (1, 1, True)
    assert second.prompt_logprobs_last_n == 1


def test_settings_may_be_a_dictionary_and_numbers_of_any_kind(
    server: ScriptedServer, sampler: SamplingClient
) -> None:
    settings: Any = {"max_tokens": "1", "temperature": np.float32(0.5)}
    sampler.sample(PROMPT, np.int64(1), settings, topk_prompt_logprobs=2.0).result(timeout=10)  # type: ignore[arg-type]
    (asked,) = server.values("asample")
    assert asked.sampling_params == types.SamplingParams(max_tokens=1, temperature=0.5)
    assert (type(asked.num_samples), asked.topk_prompt_logprobs) == (int, 2)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "words"),
    [
        (([1, 2], 1, PARAMS), {}, TypeError, "ModelInput.from_ints"),
        ((PROMPT, 0, PARAMS), {}, ValueError, "num_samples"),
        ((PROMPT, 1, 16), {}, TypeError, "SamplingParams"),
        ((PROMPT, 1, {"max_token": 1}), {}, ValueError, "max_token"),
        ((PROMPT, 1.5, PARAMS), {}, ValueError, "num_samples"),
        ((PROMPT, 1, PARAMS), {"topk_prompt_logprobs": None}, ValueError, "topk_prompt_logprobs"),
        ((PROMPT, 1, PARAMS), {"prompt_alt_tokens_k": -1}, ValueError, "prompt_alt_tokens_k"),
        ((PROMPT, 1, PARAMS), {"prompt_logprobs_last_n": 1}, ValueError, "include_prompt_logprobs"),
        (
            (PROMPT, 1, PARAMS),
            {"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True},
            ValueError,
            "last_n",
        ),
        (
            (PROMPT, 1, PARAMS),
            {"target_prompt_logprobs": types.TensorData([1.0], "float32", [1, 1])},
            ValueError,
            "int64",
        ),
    ],
)
def test_what_is_wrong_with_a_call_is_said_at_the_call(
    server: ScriptedServer,
    sampler: SamplingClient,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        sampler.sample(*arguments, **keywords)
    assert not server.values("asample")


@pytest.mark.slow
def test_a_429_pauses_and_resubmits_the_same_number(server: ScriptedServer) -> None:
    rejections = [reply({"detail": "full"}, status=429), reply({"detail": "full"}, status=429)]
    events: list[Event] = []

    class Sink:
        def emit(self, event: Event) -> None:
            events.append(event)

    def full(value: types.SampleRequest, request: Request) -> Reply:
        return rejections.pop() if rejections else server.on_asample(value, request)

    server.answers["asample"] = full
    with ServiceClient(transport=server.transport, events=Sink()) as service:
        sampler = service.create_sampling_client(base_model="toy")
        assert len(sampler.sample(PROMPT, 1, PARAMS).result(timeout=30).sequences) == 1
    assert [r.seq_id for r in server.values("asample")] == [0, 0, 0]
    assert [event for event in events if isinstance(event, SamplingPaused)] == [
        SamplingPaused("sess-1", 1.0, "full", 10 * PROMPT.length)
    ] * 2


@pytest.mark.slow
def test_a_lost_submission_is_sent_again_under_its_number(
    server: ScriptedServer, sampler: SamplingClient
) -> None:
    answers: list[Any] = [APIConnectionError(None, "cut"), reply(status=503)]

    def flaky(value: types.SampleRequest, request: Request) -> Reply:
        if not answers:
            return server.on_asample(value, request)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    server.answers["asample"] = flaky
    sampler.sample(PROMPT, 1, PARAMS).result(timeout=30)
    assert [r.seq_id for r in server.values("asample")] == [0, 0, 0]


def test_an_expired_result_is_sampled_again_under_a_new_number(
    server: ScriptedServer, sampler: SamplingClient
) -> None:
    gone = [reply({"detail": "gone"}, status=410)] * 2

    def poll(value: types.FutureRetrieveRequest, request: Request) -> Reply:
        return gone.pop() if gone else server.on_retrieve_future(value, request)

    server.answers["retrieve_future"] = poll
    assert len(sampler.sample(PROMPT, 1, PARAMS).result(timeout=30).sequences) == 1
    assert [r.seq_id for r in server.values("asample")] == [0, 1, 2]


def test_retries_can_be_switched_off(server: ScriptedServer, service: ServiceClient) -> None:
    server.answers["retrieve_future"] = lambda *_: reply({"detail": "gone"}, status=410)
    stubborn = RetryConfig(enable_retry_logic=False)
    sampler = service.create_sampling_client(base_model="toy", retry_config=stubborn)
    with pytest.raises(ResultExpiredError, match="req-0"):
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)


@pytest.mark.parametrize("failing", ["asample", "stream_sample"])
def test_without_retries_a_sample_is_submitted_once(
    server: ScriptedServer, service: ServiceClient, failing: str
) -> None:
    server.answers[failing] = lambda *_: reply({"detail": "down"}, status=503)
    sampler = service.create_sampling_client(
        base_model="toy", retry_config=RetryConfig(enable_retry_logic=False)
    )
    if failing == "stream_sample":
        with pytest.raises(InternalServerError), sampler.sample_stream(PROMPT, 1, PARAMS) as stream:
            list(stream)
    else:
        with pytest.raises(InternalServerError):
            sampler.sample(PROMPT, 1, PARAMS).result(timeout=30)
    assert len(server.values(failing)) == 1


BOUNDS: list[tuple[dict[str, Any], RetryConfig | None]] = [
    ({"max_retries": 2}, None),
    ({"max_retries": 2}, QUICK),
    ({}, replace(QUICK, max_retries=2)),
    ({"max_retries": 7}, replace(QUICK, max_retries=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "retry_config"), BOUNDS)
@pytest.mark.parametrize("failing", ["asample", "retrieve_future", "stream_sample"])
def test_max_retries_bounds_the_attempts_of_a_sample(
    server: ScriptedServer, failing: str, settings: dict[str, Any], retry_config: RetryConfig | None
) -> None:
    server.answers[failing] = lambda *_: reply(
        {"detail": "gone"}, 410 if failing == "retrieve_future" else 503
    )
    config = Config(base_url="http://mock", api_key="tml-x", **settings)
    with ServiceClient(transport=server.transport, config=config) as service:
        sampler = service.create_sampling_client(base_model="toy", retry_config=retry_config)
        if failing == "stream_sample":
            with pytest.raises(InternalServerError), sampler.sample_stream(PROMPT, 1, PARAMS) as stream:
                list(stream)
        else:
            expected = ResultExpiredError if failing == "retrieve_future" else InternalServerError
            with pytest.raises(expected):
                sampler.sample(PROMPT, 1, PARAMS).result(timeout=30)
    submitted = "stream_sample" if failing == "stream_sample" else "asample"
    assert len(server.values(submitted)) == 3, "the first attempt and two retries"
    if failing == "asample":
        assert {value.seq_id for value in server.values("asample")} == {0}, "the same request, sent again"


@pytest.mark.slow
def test_a_429_does_not_count_as_a_retry(server: ScriptedServer) -> None:
    busy = [reply({"detail": "busy"}, status=429)]
    server.answers["asample"] = lambda value, request: (
        busy.pop() if busy else server.on_asample(value, request)
    )
    config = Config(base_url="http://mock", api_key="tml-x", max_retries=0)
    with ServiceClient(transport=server.transport, config=config) as service:
        sampler = service.create_sampling_client(base_model="toy")
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=30)
    assert len(server.values("asample")) == 2


def test_errors_that_are_named_are_tried_again_too(server: ScriptedServer, service: ServiceClient) -> None:
    failed = {"error": "the batch went wrong", "category": "server"}
    answers = [reply({"detail": "odd"}, status=422), server.accept(reply(failed), sample_sequence_ids=["a"])]

    def flaky(value: types.SampleRequest, request: Request) -> Reply:
        return answers.pop() if answers else server.on_asample(value, request)

    server.answers["asample"] = flaky
    named = replace(QUICK, retryable_exceptions=(RequestFailedError, UnprocessableEntityError))
    sampler = service.create_sampling_client(base_model="toy", retry_config=named)
    assert len(sampler.sample(PROMPT, 1, PARAMS).result(timeout=30).sequences) == 1
    assert [r.seq_id for r in server.values("asample")] == [0, 1, 2]


def test_errors_that_are_not_retryable_are_raised_without_retries(
    server: ScriptedServer, service: ServiceClient
) -> None:
    server.answers["retrieve_future"] = lambda *_: reply({"detail": "gone"}, status=410)
    sampler = service.create_sampling_client(
        base_model="toy", retry_config=replace(QUICK, retryable_exceptions=())
    )
    with pytest.raises(ResultExpiredError):
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert len(server.values("asample")) == 1


def test_closing_ends_endless_retries(server: ScriptedServer, service: ServiceClient) -> None:
    server.answers["asample"] = lambda *_: reply({"detail": "no"}, status=400)
    sampler = service.create_sampling_client(
        base_model="toy", retry_config=replace(QUICK, retryable_exceptions=(Exception,))
    )
    future = sampler.sample(PROMPT, 1, PARAMS)
    wait_for(lambda: len(server.values("asample")) > 2)
    service.close("success").result(timeout=10)
    with pytest.raises(ClosedError):
        future.result(timeout=10)


@pytest.mark.slow
def test_retries_end_when_nothing_finishes_any_more(server: ScriptedServer, service: ServiceClient) -> None:
    server.answers["retrieve_future"] = lambda *_: reply({"detail": "gone"}, status=410)
    config = RetryConfig(retry_delay_base=0.001, retry_delay_max=0.002, progress_timeout=1.0)
    sampler = service.create_sampling_client(base_model="toy", retry_config=config)
    with pytest.raises((ResultExpiredError, APIConnectionError)):
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert len(server.values("asample")) > 1


@pytest.mark.parametrize(("status", "kind"), [(400, BadRequestError), (404, NotFoundError)])
def test_a_client_error_is_raised_as_its_typed_error(
    server: ScriptedServer, sampler: SamplingClient, status: int, kind: type[Exception]
) -> None:
    server.answers["asample"] = lambda *_: reply({"detail": "no"}, status=status)
    with pytest.raises(kind):
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert len(server.values("asample")) == 1


def test_a_failed_sample_is_not_tried_again(server: ScriptedServer, sampler: SamplingClient) -> None:
    failed = {"error": "prompt too long", "category": "user"}
    server.answers["asample"] = lambda *_: server.accept(reply(failed), sample_sequence_ids=["a"])
    with pytest.raises(RequestFailedError, match="too long"):
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert len(server.values("asample")) == 1


@pytest.mark.parametrize("ids", [None, [], ["a", "b"]])
def test_a_wrong_number_of_sequence_ids_is_a_protocol_error(
    server: ScriptedServer, sampler: SamplingClient, ids: list[str] | None
) -> None:
    more = {} if ids is None else {"sample_sequence_ids": ids}
    server.answers["asample"] = lambda value, _: server.accept(reply(sampled(value)), **more)
    with pytest.raises(APIResponseValidationError, match="sample_sequence_ids"):
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)


async def never(*_: Any) -> Reply:
    await asyncio.Event().wait()
    raise AssertionError


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


def test_cancelling_cancels_on_a_server_that_supports_it(server: ScriptedServer) -> None:
    server.answers["client_dynamic_config"] = lambda *_: reply({"sample_cancel_enabled": True})
    server.answers["retrieve_future"] = never
    with ServiceClient(transport=server.transport) as service:
        sampler = service.create_sampling_client(base_model="toy")
        future = sampler.sample(PROMPT, 1, PARAMS)
        wait_for(lambda: server.values("retrieve_future"))
        assert future.cancel()
        wait_for(lambda: server.values("cancel_future"))
    assert server.values("cancel_future")[0].request_id == "req-0"


def test_cancelling_an_awaited_sample_cancels_the_sample(
    server: ScriptedServer, service: ServiceClient
) -> None:
    server.answers["retrieve_future"] = never
    sampler = service.create_sampling_client(base_model="toy", retry_config=RetryConfig(max_connections=1))

    async def main() -> None:
        waiting = asyncio.ensure_future(sampler.sample_async(PROMPT, 1, PARAMS))
        while not server.values("retrieve_future"):  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.002)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    another = sampler.sample(PROMPT, 1, PARAMS)
    wait_for(lambda: len(server.values("asample")) == 2)  # the only slot is free again
    assert not server.values("cancel_future")
    another.cancel()


def test_samples_in_flight_are_bounded(server: ScriptedServer, service: ServiceClient) -> None:
    server.answers["retrieve_future"] = never
    sampler = service.create_sampling_client(base_model="toy", retry_config=RetryConfig(max_connections=3))
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(10)]
    wait_for(lambda: len(server.values("retrieve_future")) == 3)
    threading.Event().wait(0.05)
    assert len(server.values("asample")) == 3
    for future in futures:
        future.cancel()


def test_the_base_model_is_known_by_asking(sampler: SamplingClient) -> None:
    assert sampler.get_base_model() == "toy"
    assert asyncio.run(sampler.get_base_model_async()) == "toy"


def test_a_sampler_needs_a_model_and_a_proper_path(service: ServiceClient) -> None:
    with pytest.raises(ValueError, match="model_path"):
        service.create_sampling_client()
    with pytest.raises(ValueError, match="tinker://"):
        service.create_sampling_client(model_path="weights/1")


def test_a_closed_client_raises(service: ServiceClient, sampler: SamplingClient) -> None:
    service.close("success").result(timeout=10)
    with pytest.raises(ClosedError):
        sampler.sample(PROMPT, 1, PARAMS)
    with pytest.raises(ClosedError):
        sampler.get_base_model()


@pytest.mark.slow
def test_a_pickled_client_samples_in_a_process_that_never_made_a_service(server: ScriptedServer) -> None:
    program = """
    import pickle, sys
    sampler = pickle.load(sys.stdin.buffer)
    import tinkex
    prompt = tinkex.ModelInput.from_ints([1, 2, 3])
    print(sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=4)).result(30).sequences[0].tokens)
    """
    with over_http(server) as url, ServiceClient(base_url=url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="toy", retry_config=QUICK)
        sampler.sample(PROMPT, 1, PARAMS).result(timeout=10)
        sessions = server.names().count("create_session")
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            input=pickle.dumps(sampler),
            capture_output=True,
            timeout=60,
            check=False,
        )
        copy = pickle.loads(pickle.dumps(sampler))
    assert out.stdout == b"[1, 2, 3]\n", out.stderr
    assert not out.stderr
    assert server.names().count("create_session") == sessions == 1
    own, other = server.values("asample")
    assert own.sampling_session_id == other.sampling_session_id == copy._sampling_session_id
    assert own.seq_id == 0
    assert other.seq_id >= 1_000_000_000
    assert other.seq_id % 1_000_000_000 == 0
    assert QUICK in copy.__reduce__()[1]


def test_a_client_bound_to_this_process_says_why_it_cannot_be_pickled(sampler: SamplingClient) -> None:
    with pytest.raises(TypeError, match="tinkex serve"):
        pickle.dumps(sampler)


@pytest.mark.parametrize("kinds", [APIConnectionError, [TimeoutError], ("timeout",), (KeyboardInterrupt,)])
def test_what_is_not_a_tuple_of_exceptions_is_rejected(kinds: Any) -> None:
    with pytest.raises(TypeError, match="retryable_exceptions must be a tuple"):
        RetryConfig(retryable_exceptions=kinds)


def test_none_bounds_nothing_but_by_the_server(server: ScriptedServer, service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="toy", retry_config=RetryConfig(max_connections=None))
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    assert [len(future.result(timeout=10).sequences) for future in futures] == [1] * 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_connections": 0},
        {"progress_timeout": 0},
        {"retry_delay_max": 0.1},
        {"jitter_factor": 2},
        {"max_retries": -1},
        {"max_retries": True},
        {"max_retries": 1.5},
    ],
)
def test_an_invalid_retry_config_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        RetryConfig(**wrong)
