"""Every network and server fault ends in success after a retry, or in a typed error that helps.

Every case counts the requests, compares what was sent again with what was sent first, and looks for secrets in
everything a user or a log could see.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.faults.faulty_server import (
    Fault,
    FaultyServer,
    breaks_off,
    drops,
    fails_with,
    is_slow,
    running,
    says,
    sends_garbage,
    sends_huge_length,
)
from tests.scripted import ScriptedServer
from tinkex import ServiceClient, types
from tinkex._transport.advice import advice
from tinkex._transport.retry import RetryPolicy
from tinkex.clients.retry_config import RetryConfig
from tinkex.config import Config
from tinkex.config.values import POLL_BACKOFF
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    RequestFailedError,
    ResultExpiredError,
    TinkexError,
    status_error,
)
from tinkex.testing import reply

pytestmark = pytest.mark.slow

KEY = "tml-canary-key-0123456789"
SECRET = "canary-secret"
TRIES = 3
QUICK = RetryPolicy(max_retries=TRIES - 1, base_s=0.01, cap_s=0.02)
PROMPT = types.ModelInput.from_ints([1, 2, 3])
DATA = [types.Datum(PROMPT, {"target_tokens": [2, 3, 4]})]
SLOW_TIMEOUT_S = 1.5
"""Long enough that other responses arrive in time on a busy machine."""
RETRY = RetryConfig(max_retries=TRIES - 1, retry_delay_base=0.01, retry_delay_max=0.02)
ONCE = RetryConfig(enable_retry_logic=False)


@dataclass(frozen=True)
class Call:
    """A call of a user, and its endpoint."""

    endpoint: str
    act: Callable[[ServiceClient], Any]


def sampler(service: ServiceClient, retry_config: RetryConfig = RETRY) -> Any:
    return service.create_sampling_client(base_model="toy", retry_config=retry_config)


def trainer(service: ServiceClient) -> Any:
    return service.create_lora_training_client("toy")


CALLS = [
    Call("client_config", sampler),
    Call("create_session", sampler),
    Call("create_sampling_session", sampler),
    Call("create_model", trainer),
    Call("weights_info", lambda s: s.create_training_client_from_state("tinker://r/weights/a")),
    Call("forward_backward", lambda s: trainer(s).forward_backward(DATA, "cross_entropy").result(20)),
    Call("optim_step", lambda s: trainer(s).optim_step(types.AdamParams()).result(20)),
    Call("save_weights", lambda s: trainer(s).save_state("a").result(20)),
    Call("load_weights", lambda s: trainer(s).load_state("tinker://r/weights/a").result(20)),
    Call("save_weights_for_sampler", lambda s: trainer(s).save_weights_and_get_sampling_client()),
    Call("get_info", lambda s: trainer(s).get_info()),
    Call("asample", lambda s: sampler(s).sample(PROMPT, 1, types.SamplingParams(max_tokens=3)).result(20)),
    Call("get_sampler", lambda s: sampler(s).get_base_model()),
    Call("get_server_capabilities", lambda s: s.get_server_capabilities()),
]
NAMES = [call.endpoint for call in CALLS]

BROKEN: dict[str, Fault] = {
    "drops": drops,
    "breaks off": breaks_off,
    "no HTTP": sends_garbage,
    "oversize": sends_huge_length,
}
PASSING = (408, 409, 429, 500, 502, 503, 504)
FINAL = (400, 401, 402, 403, 404, 410, 413, 422, 501)
NONSENSE: dict[str, Fault] = {
    "half JSON": says(b'{"request_id": "re'),
    "a list": says(b"[1, 2]"),
    "other fields": says(b'{"something": "else"}'),
    "NaN": says(b"NaN"),
    "HTML": says(b"<html>login</html>", "text/html"),
}


def scripted() -> ScriptedServer:
    config = {"billing_exception_max_pause_duration_sec": 0}
    return ScriptedServer(client_config=lambda value, request: reply(config))


@contextmanager
def client_of(server: FaultyServer) -> Iterator[ServiceClient]:
    config = Config(
        api_key=KEY,
        base_url=server.url,
        timeout=SLOW_TIMEOUT_S if server.fault is is_slow else 20.0,
        default_headers={"authorization": f"Bearer {SECRET}"},
    )
    service = ServiceClient(config=config)
    service._caller.policy = QUICK  # noqa: SLF001 - before the session is opened, and no setting is as quick
    try:
        yield service
    finally:
        service.close("success").result(20)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG, logger="tinkex")
    yield
    assert_no_secret(caplog.text)


def assert_no_secret(*texts: str) -> None:
    for text in texts:
        assert KEY not in text
        assert SECRET not in text


def assert_helps(error: TinkexError, server: FaultyServer) -> None:
    """The error says what happened and to what, and contains no secret."""
    text = "".join(traceback.format_exception(error))
    assert_no_secret(str(error), repr(error), text, repr(getattr(error, "request", "")))
    assert len(str(error)) > 20
    if isinstance(error, APIStatusError):
        assert "the server says no" in str(error)
        assert str(error.status_code) in str(error)
        assert server.url in str(error)
        assert advice(error.status_code) in str(error)
    if isinstance(error, APIConnectionError):
        assert server.url in str(error)


def failure(act: Callable[[], Any]) -> TinkexError:
    with pytest.raises(TinkexError) as caught:
        act()
    return caught.value


def check_retry_of_a_lost_response(call: Call, fault: Fault) -> None:
    with running(FaultyServer(call.endpoint, fault, times=1, scripted=scripted())) as server:
        with client_of(server) as service:
            call.act(service)
        assert server.struck == 1
        sent = server.bodies(call.endpoint)
        assert len(sent) == 2
        assert sent[0] == sent[1]  # the same seq_id: a server that processed it recognises it


def check_permanent_network_failure(call: Call, fault: Fault) -> None:
    with running(FaultyServer(call.endpoint, fault, scripted=scripted())) as server:
        with client_of(server) as service:
            error = failure(lambda: call.act(service))
        assert isinstance(error, APIConnectionError)
        assert_helps(error, server)
        assert len(server.bodies(call.endpoint)) == TRIES
        assert len(set(server.bodies(call.endpoint))) == 1


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_a_lost_response_is_retried_with_the_same_request(call: Call, name: str) -> None:
    check_retry_of_a_lost_response(call, BROKEN[name])


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_a_permanent_network_failure_is_a_connection_error(call: Call, name: str) -> None:
    check_permanent_network_failure(call, BROKEN[name])


@pytest.mark.parametrize("check", [check_retry_of_a_lost_response, check_permanent_network_failure])
def test_a_response_that_takes_too_long_is_a_lost_response(check: Callable[[Call, Fault], None]) -> None:
    with ThreadPoolExecutor(len(CALLS)) as pool:  # all calls simultaneously: each waits for its timeouts
        for checked in [pool.submit(check, call, is_slow) for call in CALLS]:
            checked.result()


@pytest.mark.parametrize("status", PASSING)
@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_a_transient_error_status_is_retried(call: Call, status: int) -> None:
    if (call.endpoint, status) == ("asample", 429):
        pytest.skip("push-back is waited out, a second at least: see tests/unit/clients/test_sampling.py")
    with running(FaultyServer(call.endpoint, fails_with(status), times=1, scripted=scripted())) as server:
        with client_of(server) as service:
            call.act(service)
        assert len(server.bodies(call.endpoint)) == 2
        assert len(set(server.bodies(call.endpoint))) == 1


@pytest.mark.parametrize("status", [*FINAL, 503])
@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_a_permanent_error_status_is_its_typed_error(call: Call, status: int) -> None:
    with running(FaultyServer(call.endpoint, fails_with(status), scripted=scripted())) as server:
        with client_of(server) as service:
            error = failure(lambda: call.act(service))
        assert isinstance(error, APIStatusError)
        assert error.status_code == status
        assert type(error) is type(status_error(error.response, None))
        assert_helps(error, server)
        assert len(server.bodies(call.endpoint)) == (TRIES if status == 503 else 1)


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_an_invalid_response_is_a_validation_error(call: Call, name: str) -> None:
    if (call.endpoint, name) == ("client_config", "other fields"):
        pytest.skip("every field of this answer is optional, and servers may add their own")
    with running(FaultyServer(call.endpoint, NONSENSE[name], scripted=scripted())) as server:
        with client_of(server) as service:
            error = failure(lambda: call.act(service))
        assert isinstance(error, APIResponseValidationError)
        assert call.endpoint in str(error)
        assert_helps(error, server)
        assert len(server.bodies(call.endpoint)) == 1


# ---- results ----

RESULTS = {
    "ForwardBackward": lambda s: trainer(s).forward_backward(DATA, "cross_entropy").result(20),
    "OptimStep": lambda s: trainer(s).optim_step(types.AdamParams()).result(20),
    "Sample": lambda s: sampler(s, ONCE).sample(PROMPT, 1, types.SamplingParams(max_tokens=3)).result(20),
}
PROTO = "application/x-protobuf"


def polls(server: FaultyServer, kind: str) -> list[bytes]:
    return [
        request.body
        for name, request in server.requests
        if name == "retrieve_future" and request.headers["x-tinker-request-type"] == kind
    ]


def faulty_result(kind: str, fault: Fault, times: int = 1_000_000) -> FaultyServer:
    return FaultyServer("retrieve_future", fault, times, request_type=kind, scripted=scripted())


@pytest.mark.parametrize(
    "fault",
    [drops, breaks_off, fails_with(408), fails_with(500), fails_with(503), fails_with(400)],
    ids=["drops", "breaks off", "408", "500", "503", "400"],
)
@pytest.mark.parametrize("kind", RESULTS)
def test_a_lost_result_is_polled_again_and_nothing_is_submitted_twice(kind: str, fault: Fault) -> None:
    with running(faulty_result(kind, fault, times=1)) as server:
        with client_of(server) as service:
            RESULTS[kind](service)
        assert len(polls(server, kind)) == 2
        submissions = [
            name for name, _ in server.requests if name in {"forward_backward", "optim_step", "asample"}
        ]
        assert len(submissions) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 409, 413, 422, 402, 501])
@pytest.mark.parametrize("kind", RESULTS)
def test_a_permanent_error_of_a_poll_is_its_typed_error(kind: str, status: int) -> None:
    with running(faulty_result(kind, fails_with(status))) as server:
        with client_of(server) as service:
            error = failure(lambda: RESULTS[kind](service))
        assert isinstance(error, APIStatusError)
        assert error.status_code == status
        assert_helps(error, server)
        assert len(polls(server, kind)) == 1


@pytest.mark.parametrize("kind", RESULTS)
def test_an_expired_result_is_an_error_that_says_so(kind: str) -> None:
    with running(faulty_result(kind, fails_with(410))) as server:
        with client_of(server) as service:
            error = failure(lambda: RESULTS[kind](service))
        assert isinstance(error, ResultExpiredError)
        assert "submit the operation again" in str(error)
        assert len(polls(server, kind)) == 1


@pytest.mark.parametrize(
    "fault",
    [
        says(b"\x0a\xff\xff\xff", PROTO),
        says(b"\x0a\x05ab", PROTO),
        says(b"hello, this is not a message", PROTO),
        says(b"[1]"),
        says(b'{"half'),
        says(b'{"metrics": {"norm": NaN}}'),
        says(b'{"metrics": 3}'),
    ],
    ids=["cut short", "cut in a field", "no protobuf", "a list", "half JSON", "NaN", "wrong type"],
)
@pytest.mark.parametrize("kind", RESULTS)
def test_the_error_for_an_invalid_result_names_the_request(kind: str, fault: Fault) -> None:
    with running(faulty_result(kind, fault)) as server:
        with client_of(server) as service:
            error = failure(lambda: RESULTS[kind](service))
        assert isinstance(error, APIResponseValidationError)
        assert "req-" in str(error)
        assert_helps(error, server)
        assert len(polls(server, kind)) == 1


@pytest.mark.parametrize("kind", RESULTS)
def test_a_failed_operation_raises_the_servers_message(kind: str) -> None:
    fault = says(b'{"error": "datum 3 is too long", "category": "user"}')
    with running(faulty_result(kind, fault)) as server:
        with client_of(server) as service:
            error = failure(lambda: RESULTS[kind](service))
        assert isinstance(error, RequestFailedError)
        assert "datum 3 is too long" in str(error)


@pytest.mark.parametrize("status", [408, 500])
def test_polls_that_return_immediately_back_off(status: int) -> None:
    with running(faulty_result("Sample", fails_with(status))) as server, client_of(server) as service:
        started = time.monotonic()
        future = sampler(service).sample(PROMPT, 1, types.SamplingParams(max_tokens=3))
        while len(polls(server, "Sample")) < 4:
            assert not future.done()
            time.sleep(0.01)
        # The waits between them double, so they take at least this long on any machine.
        assert time.monotonic() - started > sum(POLL_BACKOFF[0] * 2**number for number in range(2))
        future.cancel()


# ---- secrets ----


def test_a_key_quoted_by_the_server_is_masked() -> None:
    fault = fails_with(403, f"the server says no to {KEY}")
    with running(FaultyServer("create_session", fault, scripted=scripted())) as server:
        with client_of(server) as service:
            error = failure(lambda: sampler(service))
        assert_helps(error, server)
        assert isinstance(error, APIStatusError)
        assert_no_secret(repr(error.response), error.response.text, str(error.body))


def test_no_text_form_shows_a_secret() -> None:
    with running(FaultyServer("none", drops, scripted=scripted())) as server, client_of(server) as service:
        training, sampling = trainer(service), sampler(service)
        request = replace(server.requests[0][1])
        assert_no_secret(
            *map(
                repr,
                (service, training, sampling, service.holder.caller.config, service.holder.caller, request),
            )
        )
