"""Remote calls over a channel: results, errors, progress and log records travel back."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

from tinkex.engine.lanes.channel import Channel
from tinkex.engine.model.progress import Progress
from tinkex.errors import TinkexError

CAST, CALL = "cast", "call"
RESULT, ERROR, PROGRESS, LOG = "result", "error", "progress", "log"


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
        with self._lock:
            try:
                self._channel.send((CALL, name, args, kwargs))
                while True:
                    kind, content = self._channel.receive()
                    if kind in (RESULT, ERROR):
                        break
                    self._handle(kind, content)
            except (EOFError, OSError) as error:
                raise Disconnected from error
        if kind == ERROR:
            raise content
        return content

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
                reply = _run(getattr(target, name), args, kwargs)
                if kind == CALL:
                    self._send(reply)
        except (EOFError, OSError):
            return

    def progress(self, phase: str, done: int, total: int | None) -> None:
        """Report the progress of a call; safe on any thread."""
        self._send((PROGRESS, (phase, done, total)))

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record that the running call logged."""
        if threading.get_ident() == self._thread:
            values = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
            if record.exc_info and not record.exc_text:
                values["exc_text"] = logging.Formatter().formatException(record.exc_info)
            self._send((LOG, values))

    def _send(self, message: tuple[str, Any]) -> None:
        with self._sending:
            self._channel.send(message)


def _run(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
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
