from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine.lanes.messages import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = (Channel(end) for end in socket.socketpair())
    yield here, there
    here.close()
    there.close()


def round_trip(message: object) -> Any:
    """Sends and receives a message; sends on another thread, because a large one does not fit into the socket buffer."""
    here, there = (Channel(end) for end in socket.socketpair())
    sending = threading.Thread(target=here.send, args=(message,))
    sending.start()
    received = there.receive()
    sending.join()
    here.close()
    there.close()
    return received


@pytest.mark.slow
@settings(max_examples=30)
@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists))
def test_a_message_round_trips(message: object) -> None:
    assert round_trip(message) == message


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_arrays_of_any_size_round_trip(size: int) -> None:
    array = np.arange(size, dtype=np.float32)
    received = round_trip({"many": [array, array[::2]], "few": np.zeros((2, 0))})
    assert np.array_equal(received["many"][0], array)
    assert np.array_equal(received["many"][1], array[::2])
    assert received["few"].shape == (2, 0)


@pytest.mark.slow
def test_more_buffers_than_one_system_call_accepts_round_trip() -> None:
    arrays = [np.full(100, n) for n in range(3000)]
    assert all(np.array_equal(a, b) for a, b in zip(round_trip(arrays), arrays, strict=True))


def test_messages_arrive_one_by_one(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    for n in range(5):
        here.send(n)
    assert [there.receive() for _ in range(5)] == list(range(5))


def test_a_closed_end_raises(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    there.close()
    with pytest.raises(EOFError):
        here.receive()
    with pytest.raises(BrokenPipeError):
        here.send("anybody?")


def test_a_truncated_message_raises() -> None:
    raw, end = socket.socketpair()
    raw.sendall(b"\x01\x00\x00\x00\x10")
    raw.close()
    channel = Channel(end)
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()


def test_closing_wakes_a_thread_that_waits_here(ends: tuple[Channel, Channel]) -> None:
    here, _ = ends
    noticed: list[type[Exception]] = []

    def wait() -> None:
        try:
            here.receive()
        except (EOFError, OSError) as error:
            noticed.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    here.close()
    waiting.join(30)
    assert len(noticed) == 1
