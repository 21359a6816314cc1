"""A queue observer of one call is notified of that call only, and instead of the client's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tinkex
from tests.scripted import ScriptedServer
from tinkex import types
from tinkex.testing import Reply, Request, reply

DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": np.ones(2)})
PROMPT = types.ModelInput.from_ints([1, 2])
PATH = "tinker://sess-1:train:0/weights/a"


def queued_once(server: ScriptedServer) -> Callable[[Any, Request], Reply]:
    """Answers the first poll of each operation with its queue state."""
    polled: set[str] = set()

    def answer(value: Any, request: Request) -> Reply:
        if value.request_id not in polled:
            polled.add(value.request_id)
            return reply(
                {"type": "try_again", "queue_state": "active", "queue_state_reason": "in line"},
                status=408,
            )
        return server.results[value.request_id]

    return answer


def service() -> tinkex.ServiceClient:
    server = ScriptedServer()
    server.answers["retrieve_future"] = queued_once(server)
    return tinkex.ServiceClient(transport=server.transport, base_url="http://mock")


class Object:
    def __init__(self) -> None:
        self.states: list[tuple[str, str | None]] = []

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        self.states.append((queue_state, queue_state_reason))


Call = Callable[[tinkex.TrainingClient, Any], Any]
CALLS: dict[str, Call] = {
    "forward": lambda run, one: run.forward([DATUM], "cross_entropy", queue_state_observer=one),
    "forward_backward": lambda run, one: run.forward_backward(
        [DATUM], "cross_entropy", queue_state_observer=one
    ),
    "optim_step": lambda run, one: run.optim_step(types.AdamParams(), queue_state_observer=one),
    "save_state": lambda run, one: run.save_state("a", queue_state_observer=one),
    "save_weights_for_sampler": lambda run, one: run.save_weights_for_sampler("a", queue_state_observer=one),
    "load_state": lambda run, one: run.load_state(PATH, queue_state_observer=one),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("form", ["function", "object"])
@pytest.mark.slow
def test_a_training_operation_notifies_its_own_observer(name: str, form: str) -> None:
    run = service().create_lora_training_client("toy")
    clients, own = Object(), Object()
    run.queue_state_observer = clients
    CALLS[name](run, own if form == "object" else own.on_queue_state_change).result()
    assert own.states == [("active", "in line")]
    assert clients.states == []
    CALLS[name](run, None).result()
    assert own.states == clients.states == [("active", "in line")]


@pytest.mark.parametrize("method", ["sample", "compute_logprobs"])
def test_a_sample_notifies_its_own_observer(method: str) -> None:
    sampler = service().create_sampling_client(base_model="toy")
    clients, own = Object(), Object()
    sampler.queue_state_observer = clients

    def call(observer: Any) -> None:
        if method == "sample":
            params = types.SamplingParams(max_tokens=1)
            sampler.sample(PROMPT, 1, params, queue_state_observer=observer).result()
        else:
            sampler.compute_logprobs(PROMPT, queue_state_observer=observer).result()

    call(own)
    assert own.states == [("active", "in line")]
    assert clients.states == []
    call(None)
    assert len(clients.states) == 1


@pytest.mark.parametrize("observer", [5, "loud"])
def test_what_cannot_observe_is_rejected_before_anything_is_sent(observer: Any) -> None:
    server = ScriptedServer()
    client = tinkex.ServiceClient(transport=server.transport, base_url="http://mock")
    run = client.create_lora_training_client("toy")
    sampler = client.create_sampling_client(base_model="toy")
    sent = len(server.calls)
    with pytest.raises(TypeError, match="cannot observe a queue"):
        run.optim_step(types.AdamParams(), queue_state_observer=observer)
    with pytest.raises(TypeError, match="cannot observe a queue"):
        sampler.sample(PROMPT, 1, types.SamplingParams(), queue_state_observer=observer)
    assert len(server.calls) == sent


@pytest.mark.parametrize("loss_fn", ["crossentropy", "PPO", "kl"])
def test_an_unknown_loss_is_rejected_before_anything_is_sent(loss_fn: Any) -> None:
    server = ScriptedServer()
    run = tinkex.ServiceClient(
        transport=server.transport, base_url="http://mock"
    ).create_lora_training_client("toy")
    sent = len(server.calls)
    for call in (run.forward, run.forward_backward):
        with pytest.raises(ValueError, match=r"unknown loss .*known: cross_entropy, importance_sampling"):
            call([DATUM], loss_fn)
    assert len(server.calls) == sent
