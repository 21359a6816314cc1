"""Heartbeats of the worker, on a connection of their own: a worker that hangs is noticed, and in the end replaced.

A long pass does not block the heartbeat: it lets other threads of its process run. A process that is stopped or deadlocked
does not answer.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

INTERVAL_S = 1.0
TIMEOUT_S = 10.0
"""How long an answer may take before it counts as missed."""
MAX_MISSED = 12
"""Answers missed in a row after which the worker is killed. They are counted one by one, so that a machine that was suspended
counts once."""

_BEAT = b"."


def answer(connection: socket.socket) -> None:
    """In the worker: answer every beat until the connection is closed."""
    try:
        while beat := connection.recv(16):
            connection.sendall(beat)
    except OSError:
        return


def monitor(connection: socket.socket, exited: threading.Event, on_change: Callable[[int], None]) -> None:
    """In the engine: call ``on_change`` with the number of answers missed in a row, after each one and on recovery.

    Returns when the worker has ``exited``, or its end of the connection is closed.
    """
    connection.settimeout(TIMEOUT_S)
    num_missed = 0
    try:
        while not exited.wait(0 if num_missed else INTERVAL_S):
            if not num_missed:
                connection.sendall(_BEAT)
            try:
                if not connection.recv(1):
                    return
            except TimeoutError:
                num_missed += 1
                on_change(num_missed)
            else:
                if num_missed:
                    on_change(0)
                num_missed = 0
    except OSError:
        return
