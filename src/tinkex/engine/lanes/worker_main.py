"""The worker process: a local backend that serves the engine's calls, and exits as soon as the engine is gone."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading

from tinkex.engine.config import EngineConfig
from tinkex.engine.lanes import heartbeat
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.lanes.messages import Channel, RemoteCallee
from tinkex.engine.lanes.worker_process import IGNORED_SIGNALS

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the connections that the command line names, until they are closed."""
    parent = os.getppid()
    faulthandler.enable()
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Signals that arrived until now are dropped here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    _exit_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    *lanes, beats = [socket.socket(fileno=int(number)) for number in sys.argv[2:]]
    threading.Thread(target=heartbeat.answer, args=(beats,), daemon=True).start()
    compute, *others = [Channel(lane) for lane in lanes]
    try:
        settings = compute.receive()
    except (EOFError, OSError):
        os._exit(0)
    computing = RemoteCallee(compute)
    backend = LocalBackend(EngineConfig(**settings["config"]), computing.progress)
    callees = [computing, *(RemoteCallee(channel) for channel in others)]
    logging.basicConfig(level=logging.WARNING, handlers=callees)
    logging.getLogger("tinkex").setLevel(settings["log_level"])
    for callee in callees[1:]:
        threading.Thread(target=_serve, args=(callee, backend), daemon=True).start()
    _serve(computing, backend)


def _serve(callee: RemoteCallee, backend: LocalBackend) -> None:
    """Serve one connection; when it is closed the engine is gone, so the process exits in the middle of anything."""
    callee.serve(backend)
    os._exit(0)


def _exit_with_parent() -> None:
    """Have the system kill this process when its parent exits, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
