"""Calls over a channel: asked on one end, carried out on the other, with results, errors and news on the way back."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

from tinkex.engine.backend.channel import Channel
from tinkex.engine.model.progress import Progress
from tinkex.errors import TinkexError

TELL, CALL = "tell", "call"
RESULT, ERROR, PROGRESS, LOG = "result", "error", "progress", "log"


class Caller:
    """The asking end. Any thread may call; one call is under way at a time.

    Example:
        >>> caller = Caller(channel, on_progress=None)
        >>> facts = caller.call("load", "tiny")
    """

    def __init__(self, channel: Channel, on_progress: Progress | None) -> None:
        self._channel = channel
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Have a method run; returns or raises what it did. ``EOFError`` or ``OSError`` of our own: the other end is gone."""
        with self._lock:
            try:
                self._channel.send((CALL, name, args, kwargs))
                while True:
                    kind, content = self._channel.receive()
                    if kind in (RESULT, ERROR):
                        break
                    self._hear(kind, content)
            except (EOFError, OSError) as error:
                raise Disconnected from error
        if kind == ERROR:
            raise content
        return content

    def tell(self, name: str, *args: Any) -> None:
        """Have a method run, later and without an answer; nothing happens if the other end is gone."""
        # If it is gone there is nothing left to tell, and whoever calls next will notice.
        with self._lock, contextlib.suppress(OSError):
            self._channel.send((TELL, name, args, {}))

    def _hear(self, kind: str, content: Any) -> None:
        if kind == LOG:
            logging.getLogger(content["name"]).handle(logging.makeLogRecord(content))
        elif self._on_progress is not None:
            self._on_progress(*content)


class Disconnected(Exception):
    """The other end is gone."""


class RemoteFailure(Exception):
    """An error of the worker that could not be sent as it was."""


class Answerer(logging.Handler):
    """The answering end: runs what is called, one after the other, until the other end is gone.

    As a handler of logs it sends what the methods log to the other end, which writes it like its own.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._sending = threading.Lock()
        self._thread: int | None = None

    def answer(self, target: object) -> None:
        """Run the methods that are called on ``target``; returns when the other end is gone."""
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
        """Tell the other end how far a call is; from any thread."""
        self._send((PROGRESS, (phase, done, total)))

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record that was logged by a call under way."""
        if threading.get_ident() == self._thread:
            told = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
            if record.exc_info and not record.exc_text:
                told["exc_text"] = logging.Formatter().formatException(record.exc_info)
            self._send((LOG, told))

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
    """The error itself if it survives the journey, or one that says the same."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):  # noqa: S301 -- our own
            return error
    except Exception:  # noqa: BLE001, S110 -- whatever is wrong with it, the text is what is left
        pass
    return RemoteFailure(f"{type(error).__name__}: {error}")
