"""What servers may offer in their configuration, and what the client makes of it."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import ScriptedServer, over_http
from tinkex import ServiceClient, types
from tinkex._runtime import background
from tinkex._transport.caller import Caller
from tinkex._wire.endpoints import endpoint
from tinkex.clients._completions import Completions
from tinkex.clients.retry_config import RetryConfig
from tinkex.config import Config
from tinkex.errors import APIStatusError, ClosedError
from tinkex.testing import MockTransport, Reply, Request, reply

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)
QUICK = RetryConfig(retry_delay_base=0.01, retry_delay_max=0.02)


def offers(**flags: Any) -> Callable[[Any, Request], Any]:
    return lambda value, request: reply(flags)


class Poller:
    """The server's side of retrieve_futures: samples finish when the test says so."""

    def __init__(self, **more: Any) -> None:
        self.finished: list[dict[str, Any]] = []
        self.reported: list[str] = []
        self.hold: asyncio.Event | None = None
        self.server = ScriptedServer(
            client_config=offers(sample_use_retrieve_futures=True, sample_max_concurrent_requests=1),
            asample=self.accept,
            retrieve_futures=self.poll,
            **more,
        )

    def accept(self, value: types.SampleRequest, request: Request) -> Any:
        accepted = self.server.on_asample(value, request)
        request_id = json.loads(accepted.body)["request_id"]
        self.finished.append(
            {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": 64}
        )
        return accepted

    async def poll(self, value: types.FuturesRetrieveRequest, request: Request) -> Any:
        self.reported += value.retrieved_request_ids
        if value.prev_cursor >= len(self.finished):
            await asyncio.sleep(0.02)
            return reply({"detail": "nothing yet"}, status=408)
        return reply({"completions": self.finished[value.prev_cursor :], "cursor": len(self.finished)})


@pytest.mark.slow
def test_one_poll_serves_many_samples() -> None:
    poller = Poller()
    with ServiceClient(transport=poller.server.transport) as service:
        client = service.create_sampling_client(base_model="toy", retry_config=QUICK)
        futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(50)]
        assert [f.result(timeout=20).sequences[0].tokens for f in futures] == [[1, 2, 3]] * 50
        client.sample(PROMPT, 1, PARAMS).result(timeout=20)
    names = poller.server.names()
    assert names.count("asample") == names.count("retrieve_future") == 51
    assert names.count("retrieve_futures") < 30
    assert not any(v.allow_metadata_only for v in poller.server.values("retrieve_future"))
    assert poller.reported  # results that were fetched may be forgotten
    assert poller.server.values("retrieve_futures")[0].target.sampling_session_id == "sess-1:sample:0"


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [reply({"completions": [], "cursor": 0}), reply({}, status=408)])
async def test_the_queue_state_of_the_oldest_sample_is_polled_while_nothing_finishes(quiet: Reply) -> None:
    """Polls for all samples say nothing about queues; a poll for one of them does."""
    asked: list[str] = []
    answers = [quiet, quiet, quiet]

    async def ask(request_id: str) -> None:
        asked.append(request_id)
        raise ClosedError("asking is extra: what comes of it ends nothing")

    async def answer(request: Request) -> Reply:
        await asyncio.sleep(0)
        if answers:
            return answers.pop()
        done = [{"state": "finished", "request_id": name} for name in ("first", "second")]
        return reply({"completions": done, "cursor": 2})

    target = types.SamplingSessionFuturesTarget(sampling_session_id="s", cloned_sampler_id=0)
    caller = Caller(MockTransport(answer), Config(base_url="http://mock", api_key="tml-x"))
    completions = Completions(caller, lambda: target, ask, queue_poll_interval_s=0.0)
    if quiet.status == 408:
        answers[1:] = []  # each is followed by a pause
    sizes = await asyncio.gather(completions.wait("first"), completions.wait("second"))
    assert list(sizes) == [0, 0]
    assert asked
    assert set(asked) == {"first"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "quiet",
    [
        {"completions": [], "cursor": 0},
        {"completions": [{"state": "finished", "request_id": "of another sample"}], "cursor": 0},
    ],
)
async def test_polls_that_a_server_answers_immediately_back_off(quiet: dict[str, Any]) -> None:
    """A server that never holds a poll is not polled as fast as it answers."""
    pauses: list[float] = []
    last = time.monotonic()

    async def answer(request: Request) -> Reply:
        nonlocal last
        now = time.monotonic()
        pauses.append(now - last)
        last = now
        if len(pauses) <= 4:
            return reply(quiet)
        return reply({"completions": [{"state": "finished", "request_id": "mine"}], "cursor": 1})

    async def ask(request_id: str) -> None:
        raise AssertionError

    target = types.SamplingSessionFuturesTarget(sampling_session_id="s", cloned_sampler_id=0)
    config = Config(base_url="http://mock", api_key="tml-x", poll_backoff=(0.02, 0.04))
    completions = Completions(Caller(MockTransport(answer), config), lambda: target, ask)
    assert await completions.wait("mine") == 0
    paused = pauses[2:5] if quiet["completions"] else pauses[1:5]  # the first time it is news
    assert len(paused) >= 3
    assert all(pause >= 0.019 for pause in paused)
    assert max(paused) >= 0.039


def test_a_polled_queue_state_reaches_the_observer_of_the_client() -> None:
    received: list[tuple[str, str | None]] = []
    paused = reply({"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "full"})
    server = ScriptedServer(
        client_config=offers(sample_use_retrieve_futures=True),
        retrieve_future=lambda value, request: paused,
    )
    with ServiceClient(transport=server.transport) as service:
        client = service.create_sampling_client(base_model="toy")
        client.queue_state_observer = lambda *news: received.append(news)
        opened = background().run(service.holder.opened())
        notify = client.queue_state_observer
        assert callable(notify)
        background().run(
            opened.results.poll_queue(endpoint("asample"), "req-1", client._sampling_session_id, notify)
        )
        assert received == [("paused_capacity", "full")]
    assert [value.allow_metadata_only for value in server.values("retrieve_future")] == [True]


def test_a_permanent_error_of_the_poller_fails_the_samples() -> None:
    server = ScriptedServer(
        client_config=offers(sample_use_retrieve_futures=True),
        retrieve_futures=lambda value, request: reply({"detail": "not offered"}, status=404),
    )
    with ServiceClient(transport=server.transport) as service:
        client = service.create_sampling_client(base_model="toy", retry_config=QUICK)
        with pytest.raises(APIStatusError, match="not offered"):
            client.sample(PROMPT, 1, PARAMS).result(timeout=20)
    assert server.names().count("retrieve_futures") == 1


def test_training_data_is_compressed_for_servers_that_ask_for_it() -> None:
    server = ScriptedServer(client_config=offers(proto_compress_fwdbwd=True))
    datum = types.Datum(PROMPT, {"target_tokens": [2, 3, 4]})
    with ServiceClient(transport=server.transport) as service:
        client = service.create_lora_training_client("toy")
        client.forward_backward([datum], "cross_entropy").result(timeout=10)
        client.optim_step(types.AdamParams()).result(timeout=10)
    encodings = {
        request.path.rpartition("/")[2]: request.headers.get("content-encoding")
        for request in server.transport.requests
    }
    assert encodings["forward_backward"] == "zstd"
    assert encodings["optim_step"] is None
    assert server.values("forward_backward")[0].data[0].model_input.to_ints() == [1, 2, 3]


def token(life_s: float = 3600) -> str:
    body = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + life_s}).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{body}.x"


def keys_sent(server: ScriptedServer) -> dict[str, str | None]:
    return {
        request.path.removeprefix("/api/v1/"): request.headers.get("x-api-key")
        for request in server.transport.requests
    }


def test_a_key_is_exchanged_for_a_token_that_goes_out_instead() -> None:
    jwt = token()
    server = ScriptedServer(
        client_config=offers(pjwt_auth_enabled=True), auth_token=lambda value, request: reply({"jwt": jwt})
    )
    with ServiceClient(transport=server.transport, api_key="tml-key") as service:
        service.create_sampling_client(base_model="toy").sample(PROMPT, 1, PARAMS).result(timeout=10)
    sent = keys_sent(server)
    assert sent.pop("client/config") == sent.pop("auth/token") == "tml-key"
    assert set(sent.values()) == {jwt}
    assert server.names().count("auth_token") == 1


def test_the_credential_command_is_used_where_there_is_no_key() -> None:
    jwt = token()
    server = ScriptedServer(
        client_config=offers(pjwt_auth_enabled=True), auth_token=lambda value, request: reply({"jwt": jwt})
    )
    config = Config(credential_cmd="echo tml-printed")
    with ServiceClient(transport=server.transport, config=config) as service:
        service.create_sampling_client(base_model="toy")
    assert keys_sent(server)["auth/token"] == "tml-printed"


def test_the_credential_command_is_enough_for_a_server_without_tokens(tmp_path: Path) -> None:
    server, runs = ScriptedServer(), tmp_path / "runs"
    config = Config(credential_cmd=f"echo run >> {runs}; echo tml-printed")
    with ServiceClient(transport=server.transport, config=config) as service:
        service.create_sampling_client(base_model="toy").sample(PROMPT, 1, PARAMS).result(timeout=10)
    assert set(keys_sent(server).values()) == {"tml-printed"}
    assert runs.read_text() == "run\n", "it is not run for every call"


def test_a_rejected_credential_of_a_command_is_printed_again(tmp_path: Path) -> None:
    old, file = "tml-old-key-0123456789", tmp_path / "key"
    file.write_text(old)

    def listed(value: Any, request: Request) -> Reply:
        valid = request.headers["x-api-key"] == file.read_text()
        return reply({"supported_models": []}) if valid else reply({"detail": "who are you?"}, status=401)

    server = ScriptedServer(get_server_capabilities=listed)
    with ServiceClient(transport=server.transport, config=Config(credential_cmd=f"cat {file}")) as service:
        service.get_server_capabilities()
        file.write_text("tml-new-key-0123456789")
        service.get_server_capabilities()
    assert server.names().count("get_server_capabilities") == 3


def test_clients_of_one_server_and_key_share_their_limiter() -> None:
    with over_http(ScriptedServer()) as url:
        services = [
            ServiceClient(base_url=url, api_key="tml-a"),
            ServiceClient(base_url=f"{url}/", api_key="tml-a"),
            ServiceClient(base_url=url, api_key="tml-b"),
        ]
        limiters = [background().run(s.holder.opened()).sampling for s in services]
        for service in services:
            service.close("success").result(timeout=10)
    assert limiters[0] is limiters[1]
    assert limiters[0] is not limiters[2]
