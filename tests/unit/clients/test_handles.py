"""Sampling clients that leave their process as a line of text, and the names older programs use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripted import ScriptedServer, over_http
from tinkex import SamplingClient, ServiceClient, TrainingClient, types
from tinkex._runtime import background
from tinkex.clients._handles import SamplerHandle
from tinkex.errors import SetupError
from tinkex.observability.events import CallbackFailed, Event
from tinkex.testing import reply

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)
CANARY = "tml-canary-0123456789"


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def service(server: ScriptedServer) -> Iterator[ServiceClient]:
    with ServiceClient(transport=server.transport) as service:
        yield service


@pytest.mark.slow
def test_a_handle_samples_in_a_process_that_never_made_a_service(server: ScriptedServer) -> None:
    program = """
    import sys
    import tinkex
    sampler = tinkex.SamplingClient.from_sampler_handle(sys.argv[1], api_key="tml-other")
    params = tinkex.SamplingParams(max_tokens=3)
    print(sampler.sample(tinkex.ModelInput.from_ints([4, 5]), 1, params).result().sequences[0].tokens)
    """
    with over_http(server) as url, ServiceClient(base_url=url, api_key=CANARY) as service:
        handle = service.create_sampling_client(
            base_model="toy", record_stability_info=True
        ).get_sampler_handle()
        out = subprocess.run(
            [sys.executable, "-c", "\n".join(line[4:] for line in program.splitlines()), handle],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            cwd=Path(__file__).parents[3],
        )
    assert out.stdout == "[4, 5]\n"
    assert CANARY not in handle
    assert server.names().count("create_session") == server.names().count("create_sampling_session") == 1
    request = server.values("asample")[0]
    assert request.sampling_session_id == "sess-1:sample:0"
    assert request.record_stability_info is True
    assert request.seq_id >= 1_000_000_000


def test_a_handle_carries_no_credentials_and_no_headers(server: ScriptedServer) -> None:
    secret = {"x-secret": "canary-header"}
    with (
        over_http(server) as url,
        ServiceClient(base_url=url, api_key=CANARY, default_headers_overrides=secret) as service,
    ):
        handle = service.create_sampling_client(base_model="toy").get_sampler_handle()
    import base64

    plain = base64.urlsafe_b64decode(handle)
    assert b"canary" not in plain
    assert SamplerHandle.parse(handle).base_url == url


@pytest.mark.parametrize("text", ["", "nonsense", "e30=", "ü", "bnVsbA=="])
def test_what_is_not_a_handle_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a sampler handle"):
        SamplingClient.from_sampler_handle(text, api_key="tml-x")


def test_a_client_bound_to_this_process_has_no_handle(service: ServiceClient) -> None:
    with pytest.raises(TypeError, match="cannot be used in another process"):
        service.create_sampling_client(base_model="toy").get_sampler_handle()


def test_copies_number_their_samples_as_the_server_says() -> None:
    server = ScriptedServer(
        client_config=lambda value, request: reply({"sample_join_sampling_session": True}),
        join_sampling_session=lambda value, request: reply({"client_counter": 7}),
    )
    with over_http(server) as url, ServiceClient(base_url=url, api_key=CANARY) as service:
        original = service.create_sampling_client(base_model="toy")
        copy = SamplingClient.from_sampler_handle(original.get_sampler_handle(), api_key=CANARY)
        for client in (original, copy, copy):
            client.sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert [value.seq_id for value in server.values("asample")] == [0, 7_000_000_000, 7_000_000_001]
    assert server.names().count("join_sampling_session") == 1


def test_a_client_can_be_made_for_a_sampler_that_is_there(
    server: ScriptedServer, service: ServiceClient
) -> None:
    client = SamplingClient.create(service.holder, sampling_session_id="sess-1:sample:9").result(timeout=10)
    client.sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert server.values("asample")[0].sampling_session_id == "sess-1:sample:9"
    assert "create_sampling_session" not in server.names()
    assert service.holder.get_session_id() == client.holder.get_session_id() == "sess-1"


@pytest.mark.slow
def test_an_overridden_method_is_called_when_the_queue_is_paused() -> None:
    received = []

    class Watching(SamplingClient):
        def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
            received.append((queue_state, queue_state_reason))

    polls = iter([reply({"queue_state": "paused_capacity", "queue_state_reason": "full"}, status=408)] * 2)
    server = ScriptedServer()
    server.answers["retrieve_future"] = lambda value, request: (
        next(polls, None) or server.on_retrieve_future(value, request)
    )
    with ServiceClient(transport=server.transport) as service:
        session = service.holder
        client = Watching(session, background().run(session.opened()), sampling_session_id="sess-1:sample:0")
        client.sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert received == [("paused_capacity", "full")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "object"])
@pytest.mark.parametrize("work", ["training", "sampling"])
def test_an_observer_is_called_with_the_queue_state_of_its_client(kind: str, work: str) -> None:
    received: list[tuple[str, str | None]] = []

    class Observer:
        def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
            received.append((queue_state, queue_state_reason))

    def observe(queue_state: str, queue_state_reason: str | None) -> None:
        received.append((queue_state, queue_state_reason))

    server = ScriptedServer()
    with ServiceClient(transport=server.transport) as service:
        training = service.create_lora_training_client("toy", rank=2)
        sampling = service.create_sampling_client(base_model="toy")
        client = training if work == "training" else sampling
        other = sampling if work == "training" else training
        client.queue_state_observer = Observer() if kind == "object" else observe
        other.queue_state_observer = lambda *_: received.append(("another client", None))
        polls = iter(
            [
                reply({"queue_state": "paused_capacity", "queue_state_reason": "full"}, status=408),
                reply({"queue_state": "paused_capacity", "queue_state_reason": "full"}, status=408),
                reply({"type": "try_again", "queue_state": "active"}),
            ]
        )
        server.answers["retrieve_future"] = lambda value, request: (
            next(polls, None) or server.on_retrieve_future(value, request)
        )
        if work == "training":
            training.optim_step(types.AdamParams()).result(timeout=10)
        else:
            sampling.sample(PROMPT, 1, PARAMS).result(timeout=10)
        assert received == [("paused_capacity", "full"), ("active", None)]
        with pytest.raises(TypeError, match="cannot observe a queue"):
            client.queue_state_observer = 3  # type: ignore[assignment]
        client.queue_state_observer = None
        assert client.queue_state_observer is None


@pytest.mark.slow
def test_an_overridden_method_of_a_training_client_is_called_when_the_queue_is_paused() -> None:
    received = []

    class Watching(TrainingClient):
        def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
            received.append((queue_state, queue_state_reason))

    polls = iter([reply({"queue_state": "paused_rate_limit"}, status=408)])
    server = ScriptedServer()
    server.answers["retrieve_future"] = lambda value, request: (
        next(polls, None) or server.on_retrieve_future(value, request)
    )
    with ServiceClient(transport=server.transport) as service:
        session = service.holder
        client = Watching(session, background().run(session.opened()), 0, "sess-1:train:0")
        client.optim_step(types.AdamParams()).result(timeout=10)
    assert received == [("paused_rate_limit", None)]


@pytest.mark.slow
def test_an_overridden_method_that_raises_ends_no_sample_and_is_an_event() -> None:
    events: list[Event] = []

    class RecordingSink:
        def emit(self, event: Event) -> None:
            events.append(event)

    class Watching(SamplingClient):
        def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
            raise RuntimeError("my own bug")

    polls = iter([reply({"queue_state": "paused_capacity", "queue_state_reason": "full"}, status=408)])
    server = ScriptedServer()
    server.answers["retrieve_future"] = lambda value, request: (
        next(polls, None) or server.on_retrieve_future(value, request)
    )
    with ServiceClient(transport=server.transport, events=RecordingSink()) as service:
        session = service.holder
        client = Watching(session, background().run(session.opened()), sampling_session_id="sess-1:sample:0")
        assert client.sample(PROMPT, 1, PARAMS).result(timeout=10).sequences
    assert CallbackFailed("on_queue_state_change", "RuntimeError: my own bug") in events


def test_copying_weights_goes_into_the_client_s_project(server: ScriptedServer) -> None:
    server.answers["copy_weights"] = lambda value, request: reply({"tinker_path": f"tinker://copy/{value.destination_project_id}"})  # fmt: skip
    with ServiceClient(transport=server.transport, project_id="p1") as service:
        assert service.copy_weights("tinker://r/weights/a").result(timeout=10) == "tinker://copy/p1"
    with ServiceClient(transport=server.transport) as service, pytest.raises(ValueError, match="project_id"):
        service.copy_weights("tinker://r/weights/a")


def test_the_console_is_the_hosted_service_s(server: ScriptedServer) -> None:
    with ServiceClient(transport=server.transport) as hosted:
        assert hosted.get_console_url().endswith("/sessions")
        training = hosted.create_lora_training_client("toy")
        assert hosted.get_console_url().endswith("/sessions/sess-1")
        assert training.get_console_url().endswith("/training_runs/sess-1:train:0")
    own = ServiceClient(transport=server.transport, base_url="http://127.0.0.1:9")
    with own, pytest.raises(SetupError, match="no console"):
        own.get_console_url()


def test_there_is_no_telemetry_to_get(server: ScriptedServer, service: ServiceClient) -> None:
    assert service.get_telemetry() is None
    assert server.calls == []


def test_external_weights_are_an_operation_in_order(server: ScriptedServer, service: ServiceClient) -> None:
    server.answers["save_weights_external"] = lambda value, request: server.accept(
        {"path": f"tinker://r/external_weights/{value.path}"}
    )
    client = service.create_lora_training_client("toy")
    client.optim_step(types.AdamParams())
    saved = client.save_weights_external("out", 3600, ["age1xyz"]).result(timeout=10)
    assert saved.path == "tinker://r/external_weights/out"
    value = server.values("save_weights_external")[0]
    assert (value.seq_id, value.ttl_seconds, value.age_encryption_recipients) == (2, 3600, ["age1xyz"])
