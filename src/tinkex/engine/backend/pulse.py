"""Signs of life of the worker, asked for on a connection of their own: one that hangs is noticed, and in the end replaced.

A long pass is no silence: it lets other threads of its process run. A process that is stopped, or has locked itself up, is.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

EVERY_S = 1.0
SILENCE_S = 10.0
"""How long an answer may take before the worker counts as silent."""
MOST_SILENCES = 12
"""Silences in a row after which it is given up. They are counted one by one, so that a machine that slept is one silence."""

_BEAT = b"."


def answer(connection: socket.socket) -> None:
    """In the worker: answer every beat until the other end is gone."""
    try:
        while beat := connection.recv(16):
            connection.sendall(beat)
    except OSError:
        return


def listen(connection: socket.socket, over: threading.Event, note: Callable[[int], None]) -> None:
    """Beside the worker: tell ``note`` how many silences in a row there were, after each and when one ends.

    Returns when the worker is ``over``, or its end of the connection is gone.
    """
    connection.settimeout(SILENCE_S)
    silences = 0
    try:
        while not over.wait(0 if silences else EVERY_S):
            if not silences:
                connection.sendall(_BEAT)
            try:
                if not connection.recv(1):
                    return
            except TimeoutError:
                silences += 1
                note(silences)
            else:
                if silences:
                    note(0)
                silences = 0
    except OSError:
        return
