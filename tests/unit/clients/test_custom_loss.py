"""Losses of the user's own: one forward pass, one call of the function, one surrogate backward pass."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.scripted import ScriptedServer
from tinkex import ServiceClient, types
from tinkex.clients.training import TrainingClient
from tinkex.config import Config
from tinkex.losses.regularizers import L2, Pipeline
from tinkex.observability.events import CustomLossFinished, CustomLossStarted, Event
from tinkex.testing import reply


def datum(*tokens: int, **more: Any) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": list(tokens), **more})


DATA = [datum(1, 2), datum(3)]


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[TrainingClient]:
    with ServiceClient(transport=server.transport) as service:
        yield service.create_lora_training_client("toy", rank=8)


def squared(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.stack([(lp**2).sum() for lp in logprobs]).sum(), {"datums": len(data)}


def test_the_surrogate_has_the_gradient_of_the_loss(server: ScriptedServer, client: TrainingClient) -> None:
    output = client.forward_backward_custom(DATA, squared).result(timeout=10)
    first, second = server.values("forward_backward")
    assert (first.forward_only, second.forward_only) == (True, False)
    assert (first.seq_id, second.seq_id) == (1, 2)
    assert first.loss_fn == second.loss_fn == "cross_entropy"
    assert [d.loss_fn_inputs["weights"].data for d in first.data] == [[0.0, 0.0], [0.0]]
    # the scripted logprobs are minus the tokens, so -d(lp²)/dlp = -2·lp = 2·token
    assert [d.loss_fn_inputs["weights"].data for d in second.data] == [[2.0, 4.0], [6.0]]
    assert output.metrics == {"loss:sum": 14.0, "surrogate_loss:sum": 6.0, "datums": 2.0}


def test_a_loss_that_calls_backward_itself_counts_once(
    server: ScriptedServer, client: TrainingClient
) -> None:
    def eager(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        loss, metrics = squared(data, logprobs)
        loss.backward(retain_graph=True)
        return loss, metrics

    client.forward_backward_custom(DATA, eager).result(timeout=10)
    _, second = server.values("forward_backward")
    assert [d.loss_fn_inputs["weights"].data for d in second.data] == [[2.0, 4.0], [6.0]]


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_what_a_program_has_switched_off_around_the_call_is_on_inside(
    server: ScriptedServer, client: TrainingClient, around: Any
) -> None:
    with around():
        spec = types.RegularizerSpec(L2(), weight=0.5)
        client.forward_backward_custom(DATA, squared, regularizers=[spec]).result(timeout=10)
        evaluated = Pipeline([spec]).evaluate(
            DATA, [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])], squared
        )
        assert not torch.is_grad_enabled()
    _, second = server.values("forward_backward")
    assert [d.loss_fn_inputs["weights"].data for d in second.data] == [[3.0, 6.0], [9.0]]
    assert evaluated.loss_total == 21.0


async def test_the_async_form_is_awaited_twice(server: ScriptedServer, client: TrainingClient) -> None:
    output = await (await client.forward_backward_custom_async(DATA, squared))
    assert output.metrics["loss:sum"] == 14.0
    assert [v.forward_only for v in server.values("forward_backward")] == [True, False]


async def test_the_async_form_warns_at_the_line_of_the_program(server: ScriptedServer) -> None:
    config = Config(base_url="http://host", api_key="tml-test", deprecation_warnings=True)
    async with ServiceClient(transport=server.transport, config=config) as service:
        client = await service.create_lora_training_client("toy", rank=8)
        with pytest.warns(DeprecationWarning, match="await forward_backward_custom") as caught:
            future = await client.forward_backward_custom_async(DATA, squared)
        await future
    assert [each.filename for each in caught] == [__file__]


async def test_on_an_event_loop_nothing_blocks_and_later_operations_follow_the_pass(
    server: ScriptedServer, client: TrainingClient
) -> None:
    opened, callers = threading.Event(), []

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        callers.append(threading.current_thread())
        assert opened.wait(60)
        return squared(data, logprobs)

    called: list[Any] = []
    for _ in range(2):
        called += [client.forward_backward_custom(DATA, loss), client.optim_step(types.AdamParams())]
    called.append(client.save_state("after"))
    cancelled = client.forward_backward_custom(DATA, loss)
    assert cancelled.cancel()
    called.append(client.optim_step(types.AdamParams()))
    await asyncio.sleep(0)  # this loop runs while the loss does not return
    opened.set()
    results = await asyncio.gather(*called)
    assert [r.metrics["loss:sum"] for r in results if isinstance(r, types.ForwardBackwardOutput)] == [
        14.0,
        14.0,
    ]
    sent = [
        (name, value.seq_id) for name, value in server.calls if hasattr(value, "seq_id") and name != "asample"
    ]
    names = ["forward_backward", "forward_backward", "optim_step"] * 2 + ["save_weights", "optim_step"]
    assert sent == [(name, number) for number, name in enumerate(names, start=1)]
    assert threading.current_thread() not in callers


async def test_on_an_event_loop_a_failing_function_is_raised_by_the_future(
    server: ScriptedServer, client: TrainingClient
) -> None:
    def fails(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        raise ZeroDivisionError("mine")

    failing, step = client.forward_backward_custom(DATA, fails), client.optim_step(types.AdamParams())
    with pytest.raises(ZeroDivisionError, match="mine"):
        await failing
    await step
    assert [v.seq_id for v in server.values("optim_step")] == [2]


def test_the_function_is_called_once_with_the_data_and_leaves(client: TrainingClient) -> None:
    calls = []

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        calls.append((data, [lp.tolist() for lp in logprobs]))
        assert all(lp.is_leaf and lp.requires_grad for lp in logprobs)
        return logprobs[0].sum(), {}

    client.forward_backward_custom(DATA, loss).result(timeout=10)
    assert calls == [(DATA, [[-1.0, -2.0], [-3.0]])]


def test_a_failing_function_uses_up_no_number(server: ScriptedServer, client: TrainingClient) -> None:
    def fails(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        client.forward_backward_custom(DATA, fails)
    client.optim_step(types.AdamParams()).result(timeout=10)
    assert [v.seq_id for v in server.values("forward_backward")] == [1]
    assert [v.seq_id for v in server.values("optim_step")] == [2]


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda data, lps: lps[0].sum(), TypeError, r"\(loss, metrics\)"),
        (lambda data, lps: (lps[0], {}), TypeError, "one value"),
        (lambda data, lps: (3.0, {}), TypeError, "torch tensor"),
        (lambda data, lps: (torch.tensor(3.0), {}), ValueError, "does not depend"),
        (
            lambda data, lps: (lps[0].sum() * torch.nan, {}),
            ValueError,
            "nan; the accumulated gradient is unchanged",
        ),
        (lambda data, lps: ((lps[0] * 0).sqrt().sum(), {}), ValueError, r"not finite for data\[0\]"),
    ],
)
def test_what_is_not_a_loss_is_rejected_and_nothing_is_trained(
    server: ScriptedServer, client: TrainingClient, loss: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        client.forward_backward_custom(DATA, loss)
    assert [v.forward_only for v in server.values("forward_backward")] == [True]


def test_arguments_are_checked_before_anything_is_sent(
    server: ScriptedServer, client: TrainingClient
) -> None:
    with pytest.raises(ValueError, match=r"data\[0\] has no target_tokens"):
        client.forward_backward_custom([types.Datum(types.ModelInput.from_ints([1]), {})], squared)
    with pytest.raises(TypeError, match="function"):
        client.forward_backward_custom(DATA, "cross_entropy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss_type_input"):
        client.forward_backward_custom(DATA, squared, loss_type_input="logits")  # type: ignore[arg-type]
    assert server.values("forward_backward") == []


def test_a_datum_the_loss_leaves_out_pulls_in_no_direction(
    server: ScriptedServer, client: TrainingClient
) -> None:
    client.forward_backward_custom(DATA, lambda data, lps: (lps[0].sum(), {})).result(timeout=10)
    assert server.values("forward_backward")[1].data[1].loss_fn_inputs["weights"].data == [0.0]


def test_parameters_of_the_users_own_get_their_gradients(client: TrainingClient) -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    client.forward_backward_custom(DATA, lambda data, lps: (scale * lps[0].sum(), {})).result(timeout=10)
    assert scale.grad is not None
    assert scale.grad.item() == -3.0


def test_several_targets_per_position_are_weighted_one_by_one() -> None:
    logprobs = np.array([[-1.0, -2.0, -3.0, -4.0]] * 3, np.float32)

    def passes(value: types.ForwardBackwardRequest, request: Any) -> Any:
        from tinkex._wire import proto

        output = types.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[{"logprobs": types.TensorData.from_numpy(logprobs)}],
            metrics={"loss:sum": 0.0},
        )
        return server.accept(reply(proto.encode_forward_backward_output(output)))

    server = ScriptedServer(forward_backward=passes)
    data = [types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": np.ones((3, 4), np.int64)})]
    with ServiceClient(transport=server.transport) as service:
        client = service.create_lora_training_client("toy")
        client.forward_backward_custom(data, lambda data, lps: (lps[0][0, 0] * 5, {})).result(timeout=10)
    weights = server.values("forward_backward")[1].data[0].loss_fn_inputs["weights"]
    assert weights.is_sparse
    assert weights.to_numpy().tolist() == [[-5.0, 0, 0, 0], [0] * 4, [0] * 4]


@pytest.mark.slow
def test_without_torch_the_error_says_how_to_get_it() -> None:
    program = """
import sys
sys.modules["torch"] = None
from tests.scripted import ScriptedServer
from tinkex import ServiceClient, types
from tinkex.errors import SetupError
server = ScriptedServer()
with ServiceClient(transport=server.transport) as service:
    client = service.create_lora_training_client("toy")
    datum = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [1]})
    try:
        client.forward_backward_custom([datum], lambda data, lps: None)
    except SetupError as error:
        print(error, "forward_backward" in server.names())
"""
    out = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        timeout=60,
    )
    assert "pip install torch" in out.stdout
    assert "False" in out.stdout


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, CustomLossStarted | CustomLossFinished):
            self.events.append(event)


def test_a_custom_loss_is_reported_when_it_starts_and_finishes(server: ScriptedServer) -> None:
    recorder = Recorder()
    with ServiceClient(transport=server.transport, events=recorder) as service:
        client = service.create_lora_training_client("toy", rank=8)
        client.forward_backward_custom(DATA, squared).result(timeout=10)
        term = types.RegularizerSpec(L2(), weight=0.5)
        client.forward_backward_custom(DATA, squared, regularizers=[term]).result(timeout=10)
    plain, ended, regularized, both = recorder.events
    assert plain == CustomLossStarted(2, 0)
    assert regularized == CustomLossStarted(2, 1)
    assert isinstance(ended, CustomLossFinished)
    assert isinstance(both, CustomLossFinished)
    assert (ended.loss, ended.regularizer_loss, ended.error) == (14.0, None, None)
    assert (both.loss, both.regularizer_loss) == (21.0, 7.0)
    assert ended.elapsed_s >= 0


def test_a_custom_loss_that_fails_is_reported_with_its_reason(server: ScriptedServer) -> None:
    def broken(data: Any, logprobs: Any) -> Any:
        raise RuntimeError("a mistake")

    class Slow(Recorder):
        def emit(self, event: Event) -> None:
            time.sleep(0.005)
            super().emit(event)

    recorder = Slow()
    with ServiceClient(transport=server.transport, events=recorder) as service:
        client = service.create_lora_training_client("toy", rank=8)
        with pytest.raises(RuntimeError, match="a mistake"):
            client.forward_backward_custom(DATA, broken)
        _, ended = recorder.events  # received before the error was raised
    assert isinstance(ended, CustomLossFinished)
    assert (ended.loss, ended.error) == (None, "RuntimeError: a mistake")
