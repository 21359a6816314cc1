"""Closing a client ends all calls that wait in it immediately."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.scripted import ScriptedServer
from tinkex import ServiceClient, types
from tinkex.clients.retry_config import RetryConfig
from tinkex.errors import ClosedError
from tinkex.observability.events import Event, RetryScheduled, SamplingPaused
from tinkex.testing import reply

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=3)
STUBBORN = RetryConfig(retry_delay_base=600, retry_delay_max=600)


class Pausing:
    """Records that a call starts to wait."""

    def __init__(self) -> None:
        self.pauses = threading.Event()

    def emit(self, event: Event) -> None:
        if isinstance(event, SamplingPaused | RetryScheduled):
            self.pauses.set()


def sample(service: ServiceClient) -> Any:
    return service.create_sampling_client(base_model="toy", retry_config=STUBBORN).sample(PROMPT, 1, PARAMS)


class Stream:
    """A sample stream with a ``result`` method."""

    def __init__(self, service: ServiceClient) -> None:
        client = service.create_sampling_client(base_model="toy", retry_config=STUBBORN)
        self._stream = client.sample_stream(PROMPT, 1, PARAMS)
        self._outcome: list[BaseException] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        try:
            list(self._stream)
        except BaseException as error:  # noqa: BLE001 - passed to the test
            self._outcome.append(error)

    def result(self, timeout: float) -> None:
        self._reading.join(timeout)
        assert not self._reading.is_alive()
        raise self._outcome[0]


def optim_step(service: ServiceClient) -> Any:
    return service.create_lora_training_client("toy").optim_step(types.AdamParams())


WAITS: dict[str, tuple[str, int, Callable[[ServiceClient], Any]]] = {
    "a sample that was pushed back": ("asample", 429, sample),
    "a sample that failed": ("asample", 503, sample),
    "a stream that was pushed back": ("stream_sample", 429, Stream),
    "a stream that failed": ("stream_sample", 503, Stream),
    "an operation that was pushed back": ("optim_step", 429, optim_step),
    "an operation that failed": ("optim_step", 503, optim_step),
    "a result that was pushed back": ("retrieve_future", 429, optim_step),
}


@pytest.mark.parametrize("name", WAITS)
def test_closing_a_client_ends_waiting_calls(name: str) -> None:
    endpoint, status, act = WAITS[name]
    answered = {"create": 0}

    def reject(value: Any, request: Any) -> Any:
        if endpoint == "retrieve_future" and not answered["create"]:
            answered["create"] += 1  # of the run itself
            return server.results[value.request_id]
        return reply({"detail": "later"}, status, headers={"retry-after": "55"})

    server, pausing = ScriptedServer(**{endpoint: reject}), Pausing()
    service = ServiceClient(transport=server.transport, events=pausing)
    waiting = act(service)
    assert pausing.pauses.wait(30)
    sent = len(server.values(endpoint))
    service.close("success").result(30)
    with pytest.raises(ClosedError):
        waiting.result(30)
    assert len(server.values(endpoint)) == sent
