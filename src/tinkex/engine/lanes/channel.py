"""Messages between the engine and its worker: one call at a time over a socket.

A message is a pickle followed by its large buffers (token ids, weights of losses), which are not copied.
Both ends are this program: data from outside is never unpickled.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<I")
_SIZE = struct.Struct("<Q")
_MAX_BUFFERS = 64
"""Buffers per system call; the kernel accepts at most 1024."""


class Channel:
    """One end of a connection. One thread at a time sends and receives.

    Example:
        >>> here, there = (Channel(end) for end in socket.socketpair())
        >>> here.send(("load", "tiny")); there.receive()
        ('load', 'tiny')
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        """Send a message; raises ``OSError`` if the other end is closed."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
        sizes = b"".join([_SIZE.pack(part.nbytes) for part in parts])
        self._write([memoryview(_HEAD.pack(len(parts)) + sizes), *parts])

    def receive(self) -> Any:
        """Returns the next message; raises ``EOFError`` or ``OSError`` if the other end is closed."""
        (count,) = _HEAD.unpack(self._read(_HEAD.size))
        sizes = self._read(count * _SIZE.size)
        body, *buffers = [self._read(size) for (size,) in _SIZE.iter_unpack(sizes)]
        return pickle.loads(body, buffers=buffers)  # noqa: S301 -- sent by the other end, which is this program

    def close(self) -> None:
        """Close the connection; pending reads on both ends return."""
        # Closing alone does not wake a thread that waits in a read.
        with contextlib.suppress(OSError):  # the other end closed it first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self, parts: Sequence[memoryview]) -> None:
        pending = [part for part in parts if part.nbytes]
        while pending:
            sent = self._connection.sendmsg(pending[:_MAX_BUFFERS])
            while pending and sent >= pending[0].nbytes:
                sent -= pending.pop(0).nbytes
            if sent:
                pending[0] = pending[0][sent:]

    def _read(self, size: int) -> bytearray:
        received = bytearray(size)
        rest = memoryview(received)
        while rest.nbytes:
            count = self._connection.recv_into(rest)
            if count == 0:
                raise EOFError("the other end is closed")
            rest = rest[count:]
        return received
