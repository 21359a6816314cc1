"""Regularizers in a pass of the client: part of what is differentiated, and nothing added where one fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.scripted import ScriptedServer
from tinkex import ServiceClient, types
from tinkex.clients.training import TrainingClient
from tinkex.losses.regularizers import L2, RegularizerSpec
from tinkex.observability.events import Event, RegularizerFinished
from tinkex.testing import reply


def datum(*tokens: int) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": list(tokens)})


DATA = [datum(1, 2), datum(3)]


def nll(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).sum(), {"datums": len(data)}


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[TrainingClient]:
    with ServiceClient(transport=server.transport) as service:
        yield service.create_lora_training_client("toy", rank=8)


def test_a_pass_takes_regularizers(server: ScriptedServer, client: TrainingClient) -> None:
    output = client.forward_backward_custom(
        DATA, nll, regularizers=[RegularizerSpec(L2(), weight=0.5)]
    ).result(timeout=10)
    _, second = server.values("forward_backward")
    # the scripted logprobs are minus the tokens: −d(−lp + ½lp²)/dlp = 1 − lp
    assert [d.loss_fn_inputs["weights"].data for d in second.data] == [[2.0, 3.0], [4.0]]
    assert output.metrics["loss:sum"] == 13.0
    assert output.metrics["base_loss:sum"] == 6.0
    assert output.metrics["regularizer/l2/value:sum"] == 14.0
    assert output.metrics["datums"] == 2.0


def test_a_loss_that_a_server_would_run_takes_regularizers_too_and_then_runs_here() -> None:
    def of_tokens(logprobs: Any) -> Any:
        return -logprobs.sum(), {}

    server = ScriptedServer(client_config=lambda value, request: reply({"custom_loss_server_side": True}))
    server.answers["create_custom_loss"] = lambda value, request: server.accept({"loss_id": "loss-0"})
    received: list[Event] = []

    class RecordingSink:
        def emit(self, event: Event) -> None:
            received.append(event)

    with ServiceClient(transport=server.transport, events=RecordingSink()) as service:
        client = service.create_lora_training_client("toy", rank=8)
        handle = service.create_custom_loss(of_tokens, {"logprobs": 1}).result(timeout=10)
        output = client.forward_backward_custom(
            DATA, handle, regularizers=[RegularizerSpec(L2(), weight=0.5)]
        ).result(timeout=10)
    assert [one.loss_fn for one in server.values("forward_backward")] == ["cross_entropy"] * 2
    assert output.metrics["regularizer/l2/value:sum"] == 14.0
    assert output.metrics["loss:sum"] == 13.0
    (finished,) = (event for event in received if isinstance(event, RegularizerFinished))
    assert (finished.name, finished.value) == ("l2", 14.0)


async def test_the_async_pass_leaves_the_callers_loop_free(
    server: ScriptedServer, client: TrainingClient
) -> None:
    released = threading.Event()

    def waits_for_the_loop(data: Any, logprobs: Any) -> Any:
        assert released.wait(20), "the caller's loop stood still"
        return logprobs[0].sum(), {}

    passing = asyncio.ensure_future(
        client.forward_backward_custom_async(
            DATA, nll, regularizers=[RegularizerSpec(waits_for_the_loop, 1.0, waits=True)]
        )
    )
    await asyncio.sleep(0.05)
    released.set()
    output = await (await passing)
    assert output.metrics["regularizer/waits_for_the_loop/value:sum"] == -3.0


def test_a_failing_regularizer_adds_nothing(server: ScriptedServer, client: TrainingClient) -> None:
    def broken(data: Any, logprobs: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        client.forward_backward_custom(DATA, nll, regularizers=[RegularizerSpec(broken, 1.0)])
    assert [v.forward_only for v in server.values("forward_backward")] == [True]


def test_wrong_specifications_are_rejected_before_anything_is_sent(
    server: ScriptedServer, client: TrainingClient
) -> None:
    with pytest.raises(TypeError, match="RegularizerSpec"):
        client.forward_backward_custom(DATA, nll, regularizers=[L2()])  # type: ignore[list-item]
    assert not server.values("forward_backward")
