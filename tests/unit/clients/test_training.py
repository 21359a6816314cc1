"""The training client: order, pieces, results, and what it rejects."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.scripted import ScriptedServer, passed
from tinkex import types
from tinkex._runtime import background
from tinkex.clients.service import ServiceClient
from tinkex.clients.training import TrainingClient
from tinkex.errors import APIResponseValidationError, BadRequestError, ClosedError, RequestFailedError
from tinkex.futures import APIFuture, AwaitableConcurrentFuture
from tinkex.testing import Reply, Request, reply

ADAM = types.AdamParams(learning_rate=1e-3)


def datum(*tokens: int) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(list(tokens)))


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def training(server: ScriptedServer) -> Iterator[TrainingClient]:
    with ServiceClient(transport=server.transport) as service:
        yield service.create_lora_training_client("toy", rank=8)


def seq_ids(server: ScriptedServer) -> list[tuple[str, int]]:
    return [(name, value.seq_id) for name, value in server.calls if getattr(value, "seq_id", None)]


def test_operations_go_out_numbered_in_the_order_of_their_calls(
    server: ScriptedServer, training: TrainingClient
) -> None:
    futures: list[APIFuture[Any]] = []
    for _ in range(3):
        futures.append(training.forward_backward([datum(1, 2)], "cross_entropy"))
        futures.append(training.optim_step(ADAM))
    futures.append(training.save_state("end"))
    for future in futures:
        future.result(timeout=10)
    names = ["forward_backward", "optim_step"] * 3 + ["save_weights"]
    assert seq_ids(server) == list(zip(names, range(1, 8), strict=True))


def test_a_pass_comes_back_as_a_typed_output(training: TrainingClient) -> None:
    future = training.forward_backward([datum(1, 2), datum(5)], "cross_entropy", {"a": 0.5, "b": "text"})
    assert isinstance(future, AwaitableConcurrentFuture)
    output = future.result(timeout=10)
    assert [o["logprobs"].data for o in output.loss_fn_outputs] == [[-1.0, -2.0], [-5.0]]
    assert output.metrics == {"loss:sum": 8.0}


def test_forward_is_a_pass_without_gradient(server: ScriptedServer, training: TrainingClient) -> None:
    training.forward([datum(1)], "cross_entropy").result(timeout=10)
    assert server.values("forward_backward")[0].forward_only
    polls = [r for r in server.transport.requests if r.path.endswith("retrieve_future")]
    assert polls[-1].headers["x-tinker-request-type"] == "Forward"


def test_the_next_operation_is_sent_before_the_last_result_is_there() -> None:
    stepped = threading.Event()

    async def hold(value: types.FutureRetrieveRequest, _: Request) -> Reply:
        if value.request_id == "req-1":  # the pass: ready only once the step has been submitted
            while not stepped.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.002)
        return server.results[value.request_id]

    def step(_: Any, __: Request) -> Reply:
        stepped.set()
        return server.accept({"metrics": {}})

    server = ScriptedServer(retrieve_future=hold, optim_step=step)
    with ServiceClient(transport=server.transport) as service:
        training = service.create_lora_training_client("toy")
        backward = training.forward_backward([datum(1)], "cross_entropy")
        training.optim_step(ADAM).result(timeout=10)
        backward.result(timeout=10)


def submissions_in_pieces(**config: Any) -> tuple[ScriptedServer, list[tuple[str, int]]]:
    """Three pieces and a step; every submission is answered late, so that overlaps show."""
    log: list[tuple[str, int]] = []

    async def slow(value: Any, _: Request) -> Reply:
        log.append(("in", value.seq_id))
        await asyncio.sleep(0.01)
        log.append(("out", value.seq_id))
        return server.accept(reply(passed(value)))

    def step(value: Any, _: Request) -> Reply:
        log.append(("step", value.seq_id))
        return server.accept({"metrics": {}})

    settings = {"fwdbwd_max_chunk_len": 1, **config}
    server = ScriptedServer(client_config=lambda *_: reply(settings), forward_backward=slow, optim_step=step)
    with ServiceClient(transport=server.transport) as service:
        training = service.create_lora_training_client("toy")
        future = training.forward_backward([datum(1), datum(2), datum(3)], "cross_entropy")
        training.optim_step(ADAM).result(timeout=10)
        output = future.result(timeout=10)
    assert [o["logprobs"].data for o in output.loss_fn_outputs] == [[-1.0], [-2.0], [-3.0]]
    assert output.metrics == {"loss:sum": 6.0}
    return server, log


def test_chunks_are_sent_concurrently_and_the_lowest_number_last() -> None:
    _, log = submissions_in_pieces()
    assert set(log[:2]) == {("in", 2), ("in", 3)}
    assert set(log[2:4]) == {("out", 2), ("out", 3)}
    assert log[4:] == [("in", 1), ("out", 1), ("step", 4)]


def test_chunks_are_sent_one_by_one_if_the_server_requires_it() -> None:
    _, log = submissions_in_pieces(parallel_fwdbwd_chunks=False)
    assert log == [("in", 1), ("out", 1), ("in", 2), ("out", 2), ("in", 3), ("out", 3), ("step", 4)]


def test_data_is_cut_by_bytes_too(server: ScriptedServer) -> None:
    server.answers["client_config"] = lambda *_: reply({"fwdbwd_max_chunk_bytes_count": 20})
    with ServiceClient(transport=server.transport) as service:
        training = service.create_lora_training_client("toy")
        training.forward([datum(1, 2), datum(3, 4), datum(5, 6)], "cross_entropy").result(timeout=10)
    sizes = {value.seq_id: len(value.data) for value in server.values("forward_backward")}
    assert sizes == {1: 2, 2: 1}


def test_a_rejected_chunk_fails_the_call_and_the_others_are_still_sent(server: ScriptedServer) -> None:
    def reject(value: Any, request: Request) -> Reply:
        if value.seq_id == 2:
            return reply({"detail": "piece two is bad"}, status=400)
        return server.on_forward_backward(value, request)

    server.answers["client_config"] = lambda *_: reply({"fwdbwd_max_chunk_len": 1})
    server.answers["forward_backward"] = reject
    with ServiceClient(transport=server.transport) as service:
        training = service.create_lora_training_client("toy")
        future = training.forward_backward([datum(1), datum(2), datum(3)], "cross_entropy")
        with pytest.raises(BadRequestError, match="piece two"):
            future.result(timeout=10)
        training.optim_step(ADAM).result(timeout=10)
    numbers = [value.seq_id for value in server.values("forward_backward")]
    assert sorted(numbers) == [1, 2, 3]
    assert numbers[-1] == 1
    assert server.values("optim_step")[0].seq_id == 4


def test_a_failed_operation_fails_alone(server: ScriptedServer, training: TrainingClient) -> None:
    server.answers["forward_backward"] = lambda *_: server.accept(
        reply({"error": "sequence too long", "category": "user"})
    )
    failed = training.forward_backward([datum(1)], "cross_entropy")
    step = training.optim_step(ADAM)
    with pytest.raises(RequestFailedError, match="too long"):
        failed.result(timeout=10)
    step.result(timeout=10)


def test_a_cancelled_future_still_takes_its_turn(server: ScriptedServer, training: TrainingClient) -> None:
    futures = [training.forward_backward([datum(1)], "cross_entropy") for _ in range(5)]
    for future in futures:
        assert isinstance(future, AwaitableConcurrentFuture)
        future.cancel()
    assert training.optim_step(ADAM).result(timeout=10).metrics == {"grad_norm": 1.0}
    assert seq_ids(server) == [*(("forward_backward", n) for n in range(1, 6)), ("optim_step", 6)]


def test_what_is_wrong_with_the_data_is_said_at_the_call_and_nothing_is_sent(
    server: ScriptedServer, training: TrainingClient
) -> None:
    pointer = types.ImageAssetPointerChunk(location="s3://x", format="png")
    before = len(server.calls)
    with pytest.raises(ValueError, match="empty"):
        training.forward_backward([], "cross_entropy")
    with pytest.raises(TypeError, match="list"):
        training.forward(datum(1), "cross_entropy")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"data\[1\] is a dict"):
        training.forward([datum(1), {}], "cross_entropy")  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"data\[0\].*ImageChunk"):
        training.forward([types.Datum(types.ModelInput(chunks=[pointer]))], "cross_entropy")
    with pytest.raises(TypeError, match="loss_fn"):
        training.forward([datum(1)], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"loss_fn_config\['beta'\]"):
        training.forward([datum(1)], "dro", {"beta": float("nan")})
    with pytest.raises(TypeError, match="beta"):
        training.forward([datum(1)], "dro", {"beta": [1]})
    with pytest.raises(TypeError, match="loss_fn_config is a mapping"):
        training.forward([datum(1)], "dro", [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="names in loss_fn_config are strings, got 1"):
        training.forward([datum(1)], "dro", {1: 0.1})  # type: ignore[dict-item]
    assert len(server.calls) == before
    training.optim_step(ADAM).result(timeout=10)
    assert seq_ids(server) == [("optim_step", 1)]


def test_a_request_that_cannot_be_written_uses_up_no_number(
    server: ScriptedServer, training: TrainingClient
) -> None:
    with pytest.raises(TypeError, match="object"):
        training.save_state("a", user_metadata={"k": object()})  # type: ignore[dict-item]
    training.optim_step(ADAM).result(timeout=10)
    assert seq_ids(server) == [("optim_step", 1)]


def test_the_data_is_taken_as_it_is_at_the_call(server: ScriptedServer, training: TrainingClient) -> None:
    data = [datum(1), datum(2)]
    future = training.forward(data, "cross_entropy")
    data.clear()
    assert len(future.result(timeout=10).loss_fn_outputs) == 2


def test_the_data_may_come_from_a_generator(server: ScriptedServer, training: TrainingClient) -> None:
    future = training.forward((datum(one) for one in (1, 2)), "cross_entropy")  # type: ignore[arg-type]
    assert len(future.result(timeout=10).loss_fn_outputs) == 2
    with pytest.raises(TypeError, match="more than once"):
        training.forward_backward_custom((datum(1) for _ in range(2)), lambda *_: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("arguments", "keywords", "error"),
    [
        ((), {}, TypeError),
        ((ADAM,), {"adam_params": ADAM}, ValueError),
        ((3,), {}, TypeError),
        (({"learning_rate": 1.0},), {}, TypeError),
    ],
)
def test_a_step_takes_its_settings_exactly_once(
    training: TrainingClient, arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="optim_step"):
        training.optim_step(*arguments, **keywords)


def test_the_settings_of_a_step_reach_the_server_by_either_name(
    server: ScriptedServer, training: TrainingClient
) -> None:
    training.optim_step(ADAM).result(timeout=10)
    training.optim_step(adam_params=ADAM).result(timeout=10)
    training.optim_step({"type": "dimuon", "learning_rate": 0.1}).result(timeout=10)
    sent = server.values("optim_step")
    assert [s.adam_params for s in sent] == [ADAM, ADAM, None]
    assert sent[2].optimizer_params == {"type": "dimuon", "learning_rate": 0.1}


def test_checkpoints_are_saved_and_loaded_by_path(server: ScriptedServer, training: TrainingClient) -> None:
    saved = training.save_state("0001", ttl_seconds=3600, overwrite=True, user_metadata={"k": "v"}).result()
    assert saved.path == "tinker://sess-1:train:0/weights/0001"
    request = server.values("save_weights")[0]
    assert (request.path, request.ttl_seconds, request.overwrite) == ("0001", 3600, True)
    assert request.user_metadata == {"k": "v"}
    training.load_state(saved.path).result()
    training.load_state_with_optimizer(saved.path, weights_access_token="token").result()
    loads = server.values("load_weights")
    assert [(load.path, load.optimizer) for load in loads] == [(saved.path, False), (saved.path, True)]
    assert loads[1].weights_access_token == "token"
    sampler = training.save_weights_for_sampler("0001").result()
    assert sampler.path == "tinker://sess-1:train:0/sampler_weights/0001"


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a?b", "x" * 201])
def test_an_invalid_checkpoint_name_is_rejected(training: TrainingClient, name: str) -> None:
    with pytest.raises(ValueError, match="checkpoint name"):
        training.save_state(name)
    with pytest.raises(ValueError, match="checkpoint name"):
        training.save_weights_for_sampler(name)


def test_invalid_paths_and_lifetimes_are_rejected(training: TrainingClient) -> None:
    with pytest.raises(ValueError, match="tinker://"):
        training.load_state("weights/0001")
    with pytest.raises(ValueError, match="ttl_seconds"):
        training.save_state("a", ttl_seconds=0)


def test_a_snapshot_is_a_sampling_client_of_its_own(server: ScriptedServer, training: TrainingClient) -> None:
    first = training.save_weights_and_get_sampling_client()
    second = asyncio.run(training.save_weights_and_get_sampling_client_async())
    assert first._sampling_session_id == "sess-1:sample:0"
    assert second._sampling_session_id == "sess-1:sample:1"
    assert "create_sampling_session" not in server.names()
    with pytest.warns(DeprecationWarning, match="name"):
        training.save_weights_and_get_sampling_client("old-style")
    named = training.create_sampling_client("tinker://sess-1:train:0/sampler_weights/a")
    assert named._sampling_session_id == "sess-1:sample:3"


def test_a_save_without_a_path_in_its_result_is_a_protocol_error(
    server: ScriptedServer, training: TrainingClient
) -> None:
    server.answers["save_weights_for_sampler"] = lambda *_: server.accept({})
    with pytest.raises(APIResponseValidationError, match="path"):
        training.save_weights_for_sampler("a").result(timeout=10)
    with pytest.raises(APIResponseValidationError, match="sampling_session_id"):
        training.save_weights_and_get_sampling_client()


def test_async_methods_are_coroutine_functions_that_call_the_plain_ones(training: TrainingClient) -> None:
    async def main() -> tuple[Any, ...]:
        future = await training.forward_backward_async([datum(1)], "cross_entropy")
        step = await training.optim_step_async(ADAM)
        assert isinstance(future, APIFuture)
        return await future, await step, await training.get_info_async()

    output, step, info = asyncio.run(main())
    assert output.metrics["loss:sum"] == 1.0
    assert step.metrics == {"grad_norm": 1.0}
    assert info.model_id == "sess-1:train:0"
    for name, member in inspect.getmembers(TrainingClient):
        if name.endswith("_async"):
            # The official client has no unload_async, and programs list its coroutine functions.
            assert inspect.iscoroutinefunction(member) == (name != "unload_async"), name


def test_methods_can_be_wrapped_on_the_class_and_twins_go_through_the_wrapper(
    training: TrainingClient,
) -> None:
    seen: list[str] = []

    class Traced(TrainingClient):
        def optim_step(self, *arguments: Any, **keywords: Any) -> Any:
            seen.append("optim_step")
            return super().optim_step(*arguments, **keywords)

    traced = Traced(training.holder, background().run(training.holder.opened()), 0, training.model_id)

    async def main() -> None:
        await (await traced.optim_step_async(ADAM))

    asyncio.run(main())
    assert seen == ["optim_step"]


def test_the_model_can_be_unloaded_after_everything_before(
    server: ScriptedServer, training: TrainingClient
) -> None:
    training.optim_step(ADAM)
    assert training.unload().result(timeout=10).model_id == training.model_id
    training.optim_step(ADAM).result(timeout=10)
    names = [name for name in server.names() if name in {"optim_step", "unload_model"}]
    assert names == ["optim_step", "unload_model", "optim_step"]
    assert seq_ids(server) == [("optim_step", 1), ("optim_step", 2)]


def test_a_closed_client_raises_and_pending_results_fail() -> None:
    async def never(value: Any, _: Request) -> Reply:
        if value.request_id != "req-0":
            await asyncio.Event().wait()
        return server.results[value.request_id]

    server = ScriptedServer(retrieve_future=never)
    service = ServiceClient(transport=server.transport)
    training = service.create_lora_training_client("toy")
    pending = training.optim_step(ADAM)
    while len(server.values("retrieve_future")) < 2:
        threading.Event().wait(0.002)
    service.close("interrupted").result(timeout=10)
    with pytest.raises(ClosedError):
        pending.result(timeout=10)
    with pytest.raises(ClosedError):
        training.optim_step(ADAM)
    with pytest.raises(ClosedError):
        training.get_info()
