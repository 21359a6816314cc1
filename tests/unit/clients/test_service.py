"""The service client: settings, factories, restoring, closing."""

from __future__ import annotations

import asyncio
import gc
import inspect
import warnings
from typing import Any

import pytest

import tinkex
from tests.scripted import ScriptedServer
from tinkex import types
from tinkex.clients.service import ServiceClient
from tinkex.config import Config
from tinkex.errors import ClosedError, ConfigError
from tinkex.futures import APIFuture
from tinkex.observability.events import Event, SessionOpened
from tinkex.testing import MockTransport, Reply, reply


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


def service_on(server: ScriptedServer, **arguments: Any) -> ServiceClient:
    return ServiceClient(transport=server.transport, **arguments)


def test_making_a_client_sends_nothing(server: ScriptedServer) -> None:
    service_on(server)
    assert server.calls == []


def test_settings_reach_the_session(server: ScriptedServer) -> None:
    service = service_on(
        server,
        user_metadata={"who": "me"},
        project_id="p1",
        display_name="shown",
        api_key="tml-mine",
        default_headers_overrides={"X-Team": "alpha"},
    )
    service.create_sampling_client(base_model="toy")
    created = server.values("create_session")[0]
    assert (created.user_metadata, created.project_id) == ({"who": "me"}, "p1")
    assert created.display_name == "shown"
    headers = server.transport.requests[0].headers
    assert (headers["x-api-key"], headers["x-team"]) == ("tml-mine", "alpha")
    service.close("success").result(timeout=10)


def test_a_config_replaces_the_arguments() -> None:
    config = Config(api_key="tml-x", base_url="http://mock")
    assert repr(ServiceClient(config=config)) == "ServiceClient(base_url='http://mock')"
    with pytest.raises(TypeError, match="base_url"):
        ServiceClient(config=config, base_url="local")


def test_an_unknown_argument_is_rejected_with_its_name() -> None:
    with pytest.raises(TypeError, match="max_retires"):
        ServiceClient(max_retires=3)  # type: ignore[call-arg]


def test_a_missing_key_is_an_error_of_the_constructor(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        ServiceClient()


def test_a_training_client_waits_for_its_model(server: ScriptedServer) -> None:
    with service_on(server) as service:
        first = service.create_lora_training_client("toy", rank=4, seed=7, train_mlp=False)
        second = asyncio.run(
            service.create_lora_training_client_async(
                "toy", user_metadata={"k": "v"}, optimizer={"type": "x"}
            )
        )
    assert (first.model_id, second.model_id) == ("sess-1:train:0", "sess-1:train:1")
    one, two = server.values("create_model")
    assert one.lora_config == types.LoraConfig(rank=4, seed=7, train_mlp=False)
    assert one.optimizer_config == {"type": "adamw"}
    assert two.lora_config.rank == 32
    assert (two.user_metadata, two.optimizer_config) == ({"k": "v"}, {"type": "x"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"train_mlp": False, "train_attn": False, "train_unembed": False},
        {"optimizer": {"lr": 1}},
    ],
)
def test_an_invalid_adapter_is_rejected_before_anything_is_sent(
    server: ScriptedServer, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"rank|at least one|type"):
        service_on(server).create_lora_training_client("toy", **wrong)
    assert server.calls == []


def test_a_run_starts_from_saved_weights(server: ScriptedServer) -> None:
    path = "tinker://run/weights/0001"
    with service_on(server) as service:
        service.create_training_client_from_state(path, user_metadata={"k": "v"})
        service.create_training_client_from_state_with_optimizer(path, weights_access_token="token")
        asyncio.run(service.create_training_client_from_state_async(path, base_model="other"))
        asyncio.run(service.create_training_client_from_state_with_optimizer_async(path))
    models, loads = server.values("create_model"), server.values("load_weights")
    assert all(m.lora_config == types.LoraConfig(rank=8, train_mlp=False) for m in models)
    assert [m.base_model for m in models] == ["toy", "toy", "other", "toy"]
    assert models[0].user_metadata == {"k": "v"}
    assert [load.optimizer for load in loads] == [False, True, False, True]
    assert [load.seq_id for load in loads] == [1, 1, 1, 1]
    assert [load.model_id for load in loads] == [f"sess-1:train:{n}" for n in range(4)]
    assert loads[1].weights_access_token == "token"


def test_weights_without_an_adapter_start_no_run(server: ScriptedServer) -> None:
    server.answers["weights_info"] = lambda *_: reply({"base_model": "toy", "is_lora": False})
    with service_on(server) as service, pytest.raises(ValueError, match="LoRA"):
        service.create_training_client_from_state("tinker://run/weights/0001")
    assert not server.values("create_model")


def test_capabilities_need_no_session(server: ScriptedServer) -> None:
    service = service_on(server)
    assert service.get_server_capabilities().supported_models[0].model_name == "toy"
    assert asyncio.run(service.get_server_capabilities_async()).supported_models
    assert set(server.names()) == {"get_server_capabilities"}


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "success"), (LookupError("secret"), "errored"), (KeyboardInterrupt(), "interrupted")],
)
def test_leaving_the_block_says_how_it_went(
    server: ScriptedServer, error: BaseException | None, status: str
) -> None:
    def use() -> None:
        with service_on(server) as service:
            service.create_sampling_client(base_model="toy")
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(type(error)):
            use()
    finish = server.values("finish_session")[0]
    assert finish.reason.type == status
    assert "secret" not in (finish.detail or "")


def test_an_async_block_closes_too(server: ScriptedServer) -> None:
    async def main() -> None:
        async with service_on(server) as service:
            await service.create_sampling_client_async(base_model="toy")

    asyncio.run(main())
    assert server.values("finish_session")[0].reason.type == "success"


def test_closing_twice_is_closing_once_and_later_calls_say_so(server: ScriptedServer) -> None:
    service = service_on(server)
    service.create_sampling_client(base_model="toy")
    first = service.close("success")
    assert isinstance(first, APIFuture)
    assert service.close("errored") is first
    first.result(timeout=10)
    assert len(server.values("finish_session")) == 1
    for call in (
        lambda: service.create_lora_training_client("toy"),
        lambda: service.create_sampling_client(base_model="toy"),
        lambda: service.create_training_client_from_state("tinker://r/weights/1"),
        service.get_server_capabilities,
        service.create_rest_client,
    ):
        with pytest.raises(ClosedError, match="closed") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
    with pytest.raises(ValueError, match="status"):
        service.close("fine")  # type: ignore[arg-type]


def test_events_reach_the_sink(server: ScriptedServer) -> None:
    events: list[Event] = []

    class Sink:
        def emit(self, event: Event) -> None:
            events.append(event)

    with service_on(server, events=Sink()) as service:
        service.create_sampling_client(base_model="toy")
    assert SessionOpened("sess-1") in events


@pytest.mark.slow
def test_an_interrupted_call_leaves_nothing_behind() -> None:
    async def never(_: Any) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        service = ServiceClient(transport=MockTransport(never))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await service.get_server_capabilities_async()
        await service.close("success")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        gc.collect()


def test_every_public_method_has_its_official_parameters() -> None:
    import tinker

    ours = {"config", "transport", "events", "lazy", "settings", "regularizers", "queue_state_observer"}
    ours |= {"kind"}  # of 0.38
    for mine, official in (
        (tinkex.ServiceClient, tinker.ServiceClient),
        (tinkex.TrainingClient, tinker.TrainingClient),
        (tinkex.SamplingClient, tinker.SamplingClient),
        (tinkex.RestClient, tinker.RestClient),
    ):
        for name, member in inspect.getmembers(mine, inspect.isfunction):
            theirs = getattr(official, name, None)
            if (name.startswith("_") and name != "__init__") or not inspect.isfunction(theirs):
                continue
            if name == "__init__" and mine is not tinkex.ServiceClient:
                continue  # only the service client is made by hand
            expected = {
                p.name: p.default
                for p in inspect.signature(theirs).parameters.values()
                if p.kind is not inspect.Parameter.VAR_KEYWORD
            }
            found = {p.name: p.default for p in inspect.signature(member).parameters.values()}
            assert {k: v for k, v in found.items() if k not in ours} == expected, f"{mine.__name__}.{name}"
