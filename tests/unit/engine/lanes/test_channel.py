from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine.lanes.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = (Channel(end) for end in socket.socketpair())
    yield here, there
    here.close()
    there.close()


def carried(message: object) -> Any:
    """A message after its journey; sent from another thread, because a large one does not fit between the ends."""
    here, there = (Channel(end) for end in socket.socketpair())
    sending = threading.Thread(target=here.send, args=(message,))
    sending.start()
    received = there.receive()
    sending.join()
    here.close()
    there.close()
    return received


@settings(max_examples=30)
@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists))
def test_what_is_sent_arrives(message: object) -> None:
    assert carried(message) == message


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_arrays_of_any_size_arrive_as_they_are(size: int) -> None:
    array = np.arange(size, dtype=np.float32)
    received = carried({"many": [array, array[::2]], "few": np.zeros((2, 0))})
    assert np.array_equal(received["many"][0], array)
    assert np.array_equal(received["many"][1], array[::2])
    assert received["few"].shape == (2, 0)


def test_more_buffers_than_the_system_takes_at_once_arrive() -> None:
    arrays = [np.full(100, n) for n in range(3000)]
    assert all(np.array_equal(a, b) for a, b in zip(carried(arrays), arrays, strict=True))


def test_messages_arrive_one_by_one(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    for n in range(5):
        here.send(n)
    assert [there.receive() for _ in range(5)] == list(range(5))


def test_an_end_that_is_closed_is_noticed(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    there.close()
    with pytest.raises(EOFError):
        here.receive()
    with pytest.raises(BrokenPipeError):
        here.send("anybody?")


def test_a_message_that_breaks_off_is_noticed() -> None:
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
