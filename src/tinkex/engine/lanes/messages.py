"""Calls of the engine to its worker, over a socket: results, errors, progress and log records travel back.

A message is a pickle followed by its large buffers (token ids, weights of losses), which are not copied.
Both ends are this program: data from outside is never unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tinkex.engine.model.progress import Progress
from tinkex.errors import TinkexError

CAST, CALL = "cast", "call"
RESULT, ERROR, PROGRESS, LOG = "result", "error", "progress", "log"

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
        self._write(_encode(message))

    def send_all(self, messages: Sequence[object]) -> None:
        """Send messages together."""
        self._write([part for message in messages for part in _encode(message)])

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


def _encode(message: object) -> Sequence[memoryview]:
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
    sizes = b"".join([_SIZE.pack(part.nbytes) for part in parts])
    return [memoryview(_HEAD.pack(len(parts)) + sizes), *parts]


class RemoteCaller:
    """The calling end. Safe on any thread; one call is in flight at a time.

    Example:
        >>> caller = RemoteCaller(channel, on_progress=None)
        >>> model_info = caller.call("load", "tiny")
    """

    def __init__(self, channel: Channel, on_progress: Progress | None) -> None:
        self._channel = channel
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method; returns its result or raises its error. Raises :class:`Disconnected` if the other end is closed."""
        with self._lock, _connected():
            self._channel.send((CALL, name, args, kwargs))
            kind, content = self._receive()
        if kind == ERROR:
            raise content
        return content

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]], results: list[Any]) -> None:
        """Call a method once for each tuple of arguments, without waiting in between; appends each result, or error, as it arrives.

        All of them are small, or the two ends would wait for each other to read.
        """
        with self._lock, _connected():
            self._channel.send_all([(CALL, name, args, {}) for args in arguments])
            for _ in arguments:
                results.append(self._receive()[1])  # noqa: PERF401 -- one by one, because the connection may be lost

    def _receive(self) -> tuple[str, Any]:
        while True:
            kind, content = self._channel.receive()
            if kind in (RESULT, ERROR):
                return kind, content
            self._handle(kind, content)

    def cast(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method without waiting for it; does nothing if the other end is closed, which the next call reports."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send((CAST, name, args, kwargs))

    def _handle(self, kind: str, content: Any) -> None:
        if kind == LOG:
            logging.getLogger(content["name"]).handle(logging.makeLogRecord(content))
        elif self._on_progress is not None:
            self._on_progress(*content)


class Disconnected(Exception):
    """The other end is closed."""


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise Disconnected from error


class RemoteFailure(Exception):
    """An error of the worker that cannot be pickled."""


class RemoteCallee(logging.Handler):
    """The called end: runs calls one after the other until the other end is closed.

    As a log handler it forwards the records of the running call to the other end, which handles them like its own.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._sending = threading.Lock()
        self._thread: int | None = None

    def serve(self, target: object) -> None:
        """Run the calls on ``target``; returns when the other end is closed."""
        self._thread = threading.get_ident()
        try:
            while True:
                kind, name, args, kwargs = self._channel.receive()
                reply = run_call(getattr(target, name), args, kwargs)
                if kind == CALL:
                    self._send(reply)
        except (EOFError, OSError):
            return

    def progress(self, phase: str, done: int, total: int | None) -> None:
        """Report the progress of a call; safe on any thread."""
        self._send((PROGRESS, (phase, done, total)))

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for records of other threads, which therefore never wait for one that is being sent."""
        return threading.get_ident() == self._thread and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record that the running call logged."""
        self._send((LOG, record_values(record)))

    def _send(self, message: tuple[str, Any]) -> None:
        with self._sending:
            self._channel.send(message)


def record_values(record: logging.LogRecord) -> Mapping[str, Any]:
    """A log record as values that can be pickled; ``logging.makeLogRecord`` is the inverse."""
    values = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
    if record.exc_info and not record.exc_text:
        values["exc_text"] = logging.Formatter().formatException(record.exc_info)
    return values


def run_call(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    """Makes a call; returns ``RESULT`` and what it returned, or ``ERROR`` and what it raised, as something that can be pickled."""
    try:
        return RESULT, method(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 -- raised at the other end
        if not isinstance(error, TinkexError):
            error.add_note(f"in the worker:\n{traceback.format_exc()}")
        return ERROR, _sendable(error)


def _sendable(error: Exception) -> Exception:
    """Returns the error itself if it can be pickled, or one with the same text."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):  # noqa: S301 -- our own
            return error
    except Exception:  # noqa: BLE001, S110 -- it cannot be pickled; its text can
        pass
    return RemoteFailure(f"{type(error).__name__}: {error}")
