"""What runs in the worker process: a local backend that answers the engine, and ends the moment the engine is gone."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading

from tinkex.engine.backend import pulse
from tinkex.engine.backend.calls import Answerer
from tinkex.engine.backend.channel import Channel
from tinkex.engine.backend.local import LocalBackend
from tinkex.engine.backend.remote import NOT_FOR_WORKERS
from tinkex.engine.config import EngineConfig

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer on the connections that the command line names, until they are closed."""
    parent = os.getppid()
    faulthandler.enable()
    for number in NOT_FOR_WORKERS:
        signal.signal(number, signal.SIG_IGN)
    # Those that came until now are dropped with this.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_WORKERS)
    _end_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    *lanes, beats = [socket.socket(fileno=int(number)) for number in sys.argv[2:]]
    threading.Thread(target=pulse.answer, args=(beats,), daemon=True).start()
    compute, *others = [Channel(lane) for lane in lanes]
    try:
        settings = compute.receive()
    except (EOFError, OSError):
        os._exit(0)
    computing = Answerer(compute)
    backend = LocalBackend(EngineConfig(**settings["config"]), computing.progress)
    answerers = [computing, *(Answerer(channel) for channel in others)]
    logging.basicConfig(level=logging.WARNING, handlers=answerers)
    logging.getLogger("tinkex").setLevel(settings["log_level"])
    for answerer in answerers[1:]:
        threading.Thread(target=_answer, args=(answerer, backend), daemon=True).start()
    _answer(computing, backend)


def _answer(answerer: Answerer, backend: LocalBackend) -> None:
    """Serve one connection; when it ends the engine is gone, and nothing that is under way matters to anybody."""
    answerer.answer(backend)
    os._exit(0)


def _end_with_parent() -> None:
    """Have the system end this process with the one that started it, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
