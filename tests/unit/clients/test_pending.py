"""Results that are used or awaited: clients from creating methods, and values."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import json
import pickle
import re
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.scripted import ScriptedServer, over_http
from tinkex import (
    AdamParams,
    APIFuture,
    BackcompatSamplingClientFuture,
    BackcompatTrainingClientFuture,
    RestClient,
    SamplingClient,
    ServiceClient,
    TrainingClient,
    types,
)
from tinkex.config import Config
from tinkex.errors import BadRequestError, NotFoundError, SetupError
from tinkex.testing import Reply, Request, reply

CONFIG = Config(base_url="http://host", api_key="tml-test", max_retries=0)
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4)
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4]})


class Gate:
    """An answer of a server that is held back until the test opens the gate."""

    def __init__(self, answer: Callable[[Any, Request], Reply]) -> None:
        self.answer = answer
        self.opened = threading.Event()
        self.arrived = threading.Semaphore(0)

    def __call__(self, value: Any, request: Request) -> Awaitable[Reply]:
        self.arrived.release()

        async def later() -> Reply:
            assert await asyncio.to_thread(self.opened.wait, 60)
            return self.answer(value, request)

        return later()


def gated(endpoint: str) -> tuple[ScriptedServer, Gate]:
    server = ScriptedServer()
    gate = Gate(getattr(server, f"on_{endpoint}"))
    server.answers[endpoint] = gate
    return server, gate


def rejecting_later() -> tuple[ScriptedServer, Gate]:
    server, gate = ScriptedServer(), Gate(lambda _, __: reply({"detail": "no such model"}, status=400))
    server.answers["create_model"] = gate
    return server, gate


def service_on(server: ScriptedServer, **more: Any) -> ServiceClient:
    return ServiceClient(transport=server.transport, config=CONFIG, **more)


CREATIONS: dict[str, tuple[Callable[[ServiceClient], Any], type]] = {
    "lora": (lambda service: service.create_lora_training_client("toy"), TrainingClient),
    "state": (
        lambda service: service.create_training_client_from_state("tinker://r/weights/1"),
        TrainingClient,
    ),
    "optimizer": (
        lambda service: service.create_training_client_from_state_with_optimizer("tinker://r/weights/1"),
        TrainingClient,
    ),
    "sampler": (lambda service: service.create_sampling_client(base_model="toy"), SamplingClient),
    "snapshot": (
        lambda service: (
            service.create_lora_training_client("toy").result().save_weights_and_get_sampling_client()
        ),
        SamplingClient,
    ),
    "saved": (
        lambda service: (
            service.create_lora_training_client("toy")
            .result()
            .create_sampling_client("tinker://r/sampler_weights/1")
        ),
        SamplingClient,
    ),
    "rest": (lambda service: service.create_rest_client(), RestClient),
}
creations = pytest.mark.parametrize(("create", "kind"), CREATIONS.values(), ids=CREATIONS)


@creations
def test_a_created_client_is_used_directly_or_by_its_result(create: Any, kind: type) -> None:
    with service_on(ScriptedServer()) as service:
        client = create(service)
        assert isinstance(client, kind)
        assert isinstance(client, APIFuture)
        assert type(client.result(timeout=0)) is kind
        assert client == client.result()
        assert hash(client) == hash(client.result())
        assert repr(client) == repr(client.result())
        assert client.future().result() is client.result() is asyncio.run(client.coroutine())
        assert {"result", "config"} <= set(dir(client))


@pytest.mark.parametrize("name", [name for name in CREATIONS if name not in {"snapshot", "saved"}])
async def test_a_created_client_is_awaited(name: str) -> None:
    create, kind = CREATIONS[name]
    async with service_on(ScriptedServer()) as service:
        assert type(await create(service)) is kind
        first, second = await asyncio.gather(create(service), create(service))
        assert type(first) is type(second) is kind
        async with asyncio.TaskGroup() as group:
            task = group.create_task(create(service).coroutine())
        assert type(task.result()) is kind
        assert type(await asyncio.wrap_future(create(service).future())) is kind


async def test_creating_does_not_block_the_event_loop_and_clients_are_created_concurrently() -> None:
    server, gate = gated("create_model")
    async with service_on(server) as service:
        first, second = (service.create_lora_training_client("toy") for _ in range(2))
        for _ in range(2):  # both requests arrive although no answer has been given
            assert await asyncio.to_thread(gate.arrived.acquire, timeout=60)
        assert repr(first) == "<TrainingClient, pending>"
        assert isinstance(first, TrainingClient)
        gate.opened.set()
        assert {(await first).model_id, (await second).model_id} == {"sess-1:train:0", "sess-1:train:1"}


def test_a_lazy_service_creates_clients_concurrently_without_an_event_loop() -> None:
    server, gate = gated("create_model")
    with service_on(server, lazy=True) as service:
        clients = [service.create_lora_training_client("toy") for _ in range(2)]
        for _ in range(2):
            assert gate.arrived.acquire(timeout=60)
        gate.opened.set()
        assert sorted(client.model_id for client in clients) == ["sess-1:train:0", "sess-1:train:1"]


def rejecting(endpoint: str) -> ScriptedServer:
    return ScriptedServer(**{endpoint: lambda value, request: reply({"detail": "no such model"}, status=400)})


def test_without_an_event_loop_the_call_raises_the_error() -> None:
    with (
        service_on(rejecting("create_model")) as service,
        pytest.raises(BadRequestError, match="no such model"),
    ):
        service.create_lora_training_client("toy")


async def test_on_an_event_loop_the_error_is_raised_by_await_and_by_the_first_use() -> None:
    server, gate = rejecting_later()
    async with service_on(server) as service:
        client = service.create_lora_training_client("toy")
        called = client.forward_backward([DATUM], "cross_entropy")
        gate.opened.set()
        for waiting in (client, called, client.optim_step_async(AdamParams())):
            with pytest.raises(BadRequestError, match="no such model"):
                await waiting  # type: ignore[misc]
        with pytest.raises(BadRequestError):
            client.forward_backward([DATUM], "cross_entropy")
        with pytest.raises(BadRequestError):
            _ = client.model_id


def test_a_lazy_service_raises_the_error_at_the_result_and_at_the_first_use() -> None:
    with service_on(rejecting("create_model"), lazy=True) as service:
        client = service.create_lora_training_client("toy")
        with pytest.raises(BadRequestError, match="no such model"):
            client.result()
        with pytest.raises(BadRequestError, match="no such model"):
            client.forward_backward([DATUM], "cross_entropy")


async def test_operations_of_a_client_that_is_being_created_do_not_block_and_keep_their_order() -> None:
    server, gate = gated("create_model")
    async with service_on(server) as service:
        client = service.create_lora_training_client("toy")
        called: list[APIFuture[Any]] = [
            client.forward_backward([DATUM], "cross_entropy"),
            client.optim_step(AdamParams()),
        ]
        called.append(client.forward_backward([DATUM], "cross_entropy"))
        cancelled = client.optim_step(AdamParams())
        assert cancelled.cancel()
        last = asyncio.create_task(client.optim_step_async(AdamParams()))
        assert await asyncio.to_thread(gate.arrived.acquire, timeout=60)
        assert not any(future.future().done() for future in called)
        gate.opened.set()
        ready = await client
        after = ready.save_state("after")
        outputs = await asyncio.gather(*called)
        assert isinstance(outputs[0], types.ForwardBackwardOutput)
        await (await last)
        await after
        operations = [
            name for name in server.names() if name in {"forward_backward", "optim_step", "save_weights"}
        ]
        assert operations[:3] == ["forward_backward", "optim_step", "forward_backward"]
        assert sorted(operations[3:]) == ["optim_step", "save_weights"]
        numbers = [value.seq_id for name, value in server.calls if name in operations]
        assert numbers == [1, 2, 3, 4, 5]


async def test_clients_and_values_of_a_client_that_is_being_created_do_not_block_and_keep_their_order() -> (
    None
):
    server, gate = gated("create_model")
    async with service_on(server) as service:
        client = service.create_lora_training_client("toy")
        info, console_url = client.get_info(), client.get_console_url()
        saved = client.create_sampling_client("tinker://r/sampler_weights/1")
        first = client.save_weights_and_get_sampling_client()
        output = client.forward_backward([DATUM], "cross_entropy")
        second = client.save_weights_and_get_sampling_client()
        sample, name = first.sample(PROMPT, 1, PARAMS), first.get_base_model()
        assert isinstance(first, SamplingClient)
        assert isinstance(info, types.GetInfoResponse)
        assert isinstance(name, str)
        assert await asyncio.to_thread(gate.arrived.acquire, timeout=60)
        assert repr(first) == "<SamplingClient, pending>"
        gate.opened.set()
        assert type(await saved) is type(await first) is type(await second) is SamplingClient
        assert type(await info) is types.GetInfoResponse
        assert (await sample).sequences
        assert (type(await name), await name) == (str, "toy")
        assert (await output).loss_fn_outputs
        with pytest.raises(SetupError, match="console"):
            await console_url
        submitted = {"forward_backward", "save_weights_for_sampler"}
        assert [(name, value.seq_id) for name, value in server.calls if name in submitted] == [
            ("save_weights_for_sampler", 1),
            ("forward_backward", 2),
            ("save_weights_for_sampler", 3),
        ]


async def test_async_names_of_a_client_that_is_being_created_do_not_block_also_where_a_program_replaced_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cookbook's capture replaces coroutine functions by functions that return coroutines."""
    original = TrainingClient.optim_step_async

    def captured(self: TrainingClient, *args: Any, **options: Any) -> Awaitable[Any]:
        return original(self, *args, **options)

    monkeypatch.setattr(TrainingClient, "optim_step_async", captured)
    server, gate = gated("create_model")
    async with service_on(server) as service:
        client = service.create_lora_training_client("toy")
        calls: list[Awaitable[Any]] = [client.optim_step_async(AdamParams()), client.unload_async()]
        asyncio.get_running_loop().call_soon(gate.opened.set)
        for call in calls:
            await (await call)
        assert {"optim_step", "unload_model"} <= set(server.names())


async def test_clients_and_values_of_a_client_that_cannot_be_created_raise_its_error() -> None:
    server, gate = rejecting_later()
    async with service_on(server) as service:
        client = service.create_lora_training_client("toy")
        sampler = client.save_weights_and_get_sampling_client()
        waiting: list[APIFuture[Any]] = [client.get_info(), sampler, sampler.sample(PROMPT, 1, PARAMS)]
        gate.opened.set()
        for each in waiting:
            with pytest.raises(BadRequestError, match="no such model"):
                await each


@contextmanager
def opened_by_a_warning(gate: Gate) -> Iterator[list[tuple[type[Warning], str]]]:
    """Opens the gate when something warns, so that what blocks without a warning does not end; gives the warnings."""
    caught: list[tuple[type[Warning], str]] = []

    def show(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
        caught.append((category, filename))
        assert "await the call" in str(message)
        gate.opened.set()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield caught


async def test_using_a_client_before_it_was_awaited_blocks_with_one_warning() -> None:
    server, gate = gated("create_model")
    async with service_on(server) as service:
        with opened_by_a_warning(gate) as caught:
            client = service.create_lora_training_client("toy")
            assert client.model_id == "sess-1:train:0"
            assert client.model_seq_id == 0
        assert caught == [(RuntimeWarning, __file__)]


def test_attributes_are_those_of_the_client() -> None:
    with service_on(ScriptedServer()) as service:
        sampler = service.create_sampling_client(base_model="toy")
        sampler.queue_state_observer = lambda state, reason: None
        assert sampler.result().queue_state_observer is sampler.queue_state_observer
        sampler.label = "mine"  # type: ignore[attr-defined]
        assert sampler.result().label == "mine"  # type: ignore[attr-defined]
        del sampler.label  # type: ignore[attr-defined]
        assert not hasattr(sampler, "label")
        assert not callable(sampler)
        with pytest.raises(AttributeError, match="nonsense"):
            sampler.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_patches_on_the_class_apply_to_clients_that_are_used_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cookbook's tracing and capture replace methods of the class."""
    seen: list[object] = []
    sample = SamplingClient.sample

    def traced(self: SamplingClient, *args: Any, **options: Any) -> Any:
        seen.append(self)
        return sample(self, *args, **options)

    monkeypatch.setattr(SamplingClient, "sample", traced)
    with service_on(ScriptedServer()) as service:
        sampler = service.create_sampling_client(base_model="toy")
        sampler.sample(PROMPT, 1, PARAMS).result()
        asyncio.run(sampler.sample_async(PROMPT, 1, PARAMS))
        assert seen == [sampler, sampler]
        assert SamplingClient.sample(sampler, PROMPT, 1, PARAMS).result().sequences


def test_a_service_that_returns_clients_of_its_own_keeps_working() -> None:
    class Recording(SamplingClient):
        pass

    class Mine(ServiceClient):
        def create_sampling_client(self, *args: Any, **options: Any) -> Any:
            made = super().create_sampling_client(*args, **options).result()
            made.__class__ = Recording
            return made

    with Mine(transport=ScriptedServer().transport, config=CONFIG) as service:
        assert type(service.create_sampling_client(base_model="toy")) is Recording
        created = asyncio.run(ServiceClient.create_rest_client(service).coroutine())
        assert type(created) is RestClient


@pytest.mark.slow
async def test_a_pending_sampling_client_is_pickled_as_the_plain_class() -> None:
    with over_http(ScriptedServer()) as url:
        async with ServiceClient(base_url=url, api_key="tml-test") as service:
            pending = service.create_sampling_client(base_model="toy")
            restored = pickle.loads(await asyncio.to_thread(pickle.dumps, pending))
            assert type(restored) is SamplingClient
            assert (await restored.sample(PROMPT, 1, PARAMS)).sequences
            handle = (await pending).get_sampler_handle()
            assert handle == await handle == json.loads(json.dumps(handle))
            other = SamplingClient.from_sampler_handle(handle, api_key="tml-test")
            assert type(await other) is SamplingClient
            assert (await other.sample(PROMPT, 1, PARAMS)).sequences


def test_the_futures_of_clients_have_the_classes_of_038() -> None:
    with service_on(ScriptedServer()) as service:
        training = service.create_lora_training_client("toy")
        sampler = training.save_weights_and_get_sampling_client()
        assert isinstance(training, BackcompatTrainingClientFuture)
        assert isinstance(training, TrainingClient)
        assert isinstance(sampler, BackcompatSamplingClientFuture)
        assert not isinstance(sampler, BackcompatTrainingClientFuture)
        assert not isinstance(training.result(), BackcompatTrainingClientFuture)


# ---- values ----


def test_values_are_used_directly_or_by_their_result() -> None:
    with service_on(ScriptedServer()) as service:
        training = service.create_lora_training_client("toy")
        info = training.get_info()
        assert isinstance(info, types.GetInfoResponse)
        assert isinstance(info, APIFuture)
        assert info.model_data.model_name == "toy"
        assert info == info.result() == asyncio.run(info.coroutine())
        assert info.result() == info
        assert type(info.result()) is type(copy.deepcopy(info)) is types.GetInfoResponse
        assert dict(info)["lora_rank"] == 8
        assert pickle.loads(pickle.dumps(info)) == info.result()
        assert info.model_dump() == info.result().model_dump()
        capabilities = service.get_server_capabilities()
        assert capabilities.model_names() == capabilities.result().model_names() == ["toy"]
        name = training.save_weights_and_get_sampling_client().get_base_model()
        assert isinstance(name, str)
        assert isinstance(name, APIFuture)
        assert name == name.result() == "toy"
        assert type(name.result()) is type(pickle.loads(pickle.dumps(name))) is str
        assert json.dumps({"model": name}) == '{"model": "toy"}'
        assert name.future().result() == asyncio.run(name.coroutine()) == "toy"


async def created_off_the_loop(create: Callable[..., Any], *arguments: Any) -> Any:
    """A client that does not have its values yet, because it was created where no event loop runs."""
    return (await asyncio.to_thread(create, *arguments)).result()


async def test_a_client_that_was_created_on_an_event_loop_has_its_values() -> None:
    server = ScriptedServer()
    async with service_on(server) as service:
        training = await service.create_lora_training_client("toy")
        samplers = [
            await service.create_sampling_client(base_model="toy"),
            await training.save_weights_and_get_sampling_client(),
        ]
        values = [each for each in server.names() if each in {"get_info", "get_sampler"}]
        assert values == ["get_info", "get_sampler", "get_sampler"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for client in (training, training):
                assert client.get_info().lora_rank == 8
            for sampler in samplers:
                assert re.fullmatch("toy", sampler.get_base_model())
        assert [each for each in server.names() if each in {"get_info", "get_sampler"}] == values


async def test_a_client_whose_values_cannot_be_read_is_usable() -> None:
    server = ScriptedServer(
        get_info=lambda value, request: reply({"detail": "no such call"}, status=404),
        get_sampler=lambda value, request: reply({"detail": "no such call"}, status=404),
    )
    async with service_on(server) as service:
        training = await service.create_lora_training_client("toy")
        await training.optim_step(AdamParams())
        sampler = await training.save_weights_and_get_sampling_client()
        assert (await sampler.sample(PROMPT, 1, PARAMS)).sequences
        for value in (training.get_info, sampler.get_base_model):
            with pytest.raises(NotFoundError, match="no such call"):
                await value()


async def test_awaiting_a_value_does_not_block_the_event_loop() -> None:
    server = ScriptedServer()
    gates = []
    for endpoint in ("get_info", "get_sampler", "get_server_capabilities"):
        gates.append(Gate(getattr(server, f"on_{endpoint}")))
        server.answers[endpoint] = gates[-1]
    async with service_on(server) as service:
        training = await created_off_the_loop(service.create_lora_training_client, "toy")
        sampler = await created_off_the_loop(service.create_sampling_client, None, "toy")
        values = asyncio.gather(
            training.get_info(), sampler.get_base_model(), service.get_server_capabilities()
        )
        for gate in gates:
            assert await asyncio.to_thread(gate.arrived.acquire, timeout=60)
            gate.opened.set()
        info, name, capabilities = await values
        assert type(info) is types.GetInfoResponse
        assert type(name) is str
        assert type(capabilities) is types.GetServerCapabilitiesResponse


async def test_a_result_can_be_gathered_again_and_is_found_in_a_dictionary_before_and_after_it_is_there() -> (
    None
):
    async with service_on(ScriptedServer()) as service:
        results = [
            service.create_sampling_client(base_model="toy"),
            service.get_server_capabilities(),  # which has lists, and so no hash
        ]
        places = {result: place for place, result in enumerate(results)}
        first, second = await asyncio.gather(*results), await asyncio.gather(*results)
        assert first == second
        assert [places[result] for result in results] == [0, 1]


async def test_using_a_value_before_it_was_awaited_blocks_with_one_warning() -> None:
    server, gate = gated("get_info")
    async with service_on(server) as service:
        training = await created_off_the_loop(service.create_lora_training_client, "toy")
        with opened_by_a_warning(gate) as caught:
            info = training.get_info()
            assert info.model_data.model_name == "toy"
            assert info.lora_rank == 8
        assert caught == [(RuntimeWarning, __file__)]


async def test_a_string_before_it_was_awaited_has_the_methods_of_a_string() -> None:
    server, gate = gated("get_sampler")
    async with service_on(server) as service:
        sampler = await created_off_the_loop(service.create_sampling_client, None, "toy")
        with opened_by_a_warning(gate) as caught:
            name = sampler.get_base_model()
            assert isinstance(name, str)
            assert f"<{name}>" == "<toy>"
        assert caught == [(RuntimeWarning, __file__)]
        assert name.startswith("t")
        assert name + "/x" == "toy/x"
        assert "a " + name == "a toy"
        assert (len(name), name[0], "o" in name, list(name)) == (3, "t", True, ["t", "o", "y"])
        assert {"toy": 1}[name] == 1
        assert "a" <= name < "z" >= name > "b"
        assert bool(name)


@pytest.mark.parametrize("on_loop", [False, True])
def test_errors_of_values_are_raised_at_the_call_or_at_the_await(on_loop: bool) -> None:
    server = ScriptedServer(get_sampler=lambda value, request: reply({"detail": "gone"}, status=404))
    with service_on(server) as service:
        sampler = service.create_sampling_client(base_model="toy")

        async def main() -> None:
            await sampler.get_base_model()

        with pytest.raises(NotFoundError, match="gone"):
            asyncio.run(main()) if on_loop else sampler.get_base_model()


def test_plain_results_stay_plain() -> None:
    with service_on(ScriptedServer()) as service:
        assert service.get_telemetry() is None
        assert service.renew_session() is False
        assert asyncio.run(service.renew_session_async()) is False


# ---- the holder ----


def test_the_holder_is_closed_without_arguments_and_can_be_assigned() -> None:
    server = ScriptedServer()
    service, other = service_on(server), service_on(ScriptedServer())
    training = service.create_lora_training_client("toy")
    holder = service.holder
    assert holder is training.holder
    other.holder = training.holder = holder
    assert other.create_sampling_client(base_model="toy").holder is holder
    holder.close()
    holder.close()
    with pytest.raises(RuntimeError, match="closed"):
        training.optim_step(AdamParams())
    assert "finish_session" not in server.names(), "ServiceClient.close reports how a program ended"


# ---- deprecations ----


def test_deprecated_names_warn_at_the_users_line_if_the_settings_ask_for_it() -> None:
    config = Config(base_url="http://host", api_key="tml-test", deprecation_warnings=True)
    lines: list[int] = []

    def next_line() -> None:
        lines.append(inspect.stack()[1].lineno + 1)

    async def main() -> None:
        async with ServiceClient(transport=ScriptedServer().transport, config=config) as service:
            next_line()
            training = await service.create_lora_training_client_async("toy")
            next_line()
            step = await training.optim_step_async(AdamParams())
            await step
            sampler = await service.create_sampling_client(base_model="toy")
            next_line()
            await asyncio.gather(sampler.sample_async(PROMPT, 1, PARAMS))
            next_line()
            task = asyncio.create_task(sampler.get_base_model_async())
            await task
            next_line()
            rest = await service.create_rest_client()
            next_line()
            await rest.get_sampler_async("s")
            next_line()
            await training.unload_async()
            next_line()
            await service.get_server_capabilities()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line) for line in lines]
    assert {each.category for each in caught} == {DeprecationWarning}
    assert "TrainingClient.optim_step_async is deprecated; await optim_step(…)" in str(caught[1].message)
    assert "is deprecated; use RestClient().get_server_capabilities()" in str(caught[-1].message)


def test_async_names_warn_at_the_users_line_in_tasks_of_any_thread() -> None:
    config = Config(base_url="http://host", api_key="tml-test", deprecation_warnings=True)
    with ServiceClient(transport=ScriptedServer().transport, config=config) as service:
        sampler = service.create_sampling_client(base_model="toy")
        assert asyncio.iscoroutinefunction(sampler.sample_async)

        async def main() -> int:
            line = inspect.stack()[0].lineno + 1
            calls = [sampler.sample_async(PROMPT, 1, PARAMS) for _ in range(2)]
            await asyncio.gather(*calls)
            return line

        with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(1) as pool:
            warnings.simplefilter("always")
            line = pool.submit(asyncio.run, main()).result(timeout=60)
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line)] * 2


def test_a_method_that_a_program_replaces_on_the_class_warns_and_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(base_url="http://host", api_key="tml-test", deprecation_warnings=True)
    seen: list[object] = []
    sample_async = SamplingClient.sample_async

    async def traced(self: SamplingClient, *args: Any, **options: Any) -> Any:
        seen.append(self)
        return await sample_async(self, *args, **options)

    with ServiceClient(transport=ScriptedServer().transport, config=config) as service:
        sampler = service.create_sampling_client(base_model="toy").result()
        monkeypatch.setattr(SamplingClient, "sample_async", traced)
        with pytest.warns(
            DeprecationWarning, match=r"SamplingClient.sample_async is deprecated; await sample"
        ):
            asyncio.run(sampler.sample_async(PROMPT, 1, PARAMS))
    assert seen == [sampler]


async def test_an_async_name_of_a_client_that_is_being_created_warns_where_it_is_awaited() -> None:
    config = Config(base_url="http://host", api_key="tml-test", deprecation_warnings=True)
    server, gate = gated("create_model")
    async with ServiceClient(transport=server.transport, config=config) as service:
        client = service.create_lora_training_client("toy")
        asyncio.get_running_loop().call_soon(gate.opened.set)
        with pytest.warns(DeprecationWarning, match="optim_step_async") as caught:
            await client.optim_step_async(AdamParams())
        assert [each.filename for each in caught] == [__file__]


async def test_async_names_do_not_warn_by_default() -> None:
    async with service_on(ScriptedServer()) as service:
        training = await service.create_lora_training_client_async("toy")
        await (await training.optim_step_async(AdamParams()))
        await (await training.unload_async())


def test_a_done_callback_may_use_the_client() -> None:
    done: concurrent.futures.Future[int] = concurrent.futures.Future()
    with service_on(ScriptedServer()) as service:

        def created(future: concurrent.futures.Future[TrainingClient]) -> None:
            output = (
                future.result().forward_backward([DATUM], "cross_entropy").result()
            )  # pending: this blocks
            done.set_result(len(output.loss_fn_outputs))

        service.create_lora_training_client("toy").future().add_done_callback(created)
        assert done.result(timeout=60) == 1
