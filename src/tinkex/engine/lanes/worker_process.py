"""The backend in a worker process: started, monitored and, when it exits, started again.

The worker runs :class:`~tinkex.engine.lanes.in_process.LocalBackend`; this end has the same methods and forwards them. Four
connections lead to it, so that a long pass blocks neither a savepoint that is being written nor a check nor an import; a fifth
one carries heartbeats.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.engine.lanes import heartbeat
from tinkex.engine.lanes.in_process import LocalBackend
from tinkex.engine.lanes.interface import ModelInfo, StepResult, WorkerLost, WorkerStatus
from tinkex.engine.lanes.messages import Channel, Disconnected, RemoteCaller
from tinkex.engine.lanes.remote import Callbacks, RemoteBackend, called

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.types import AdamParams

EXIT_TIMEOUT_S = 5.0
"""How long a worker whose connections are closed may take to exit."""
CONNECTIONS = ("compute", "write", "check", "import")
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what a service manager sends to a whole group, are for the engine, which stops its worker itself."""

_PROGRAM = "import sys; sys.path[:] = {path!r}; from tinkex.engine.lanes.worker_main import main; main()"
_OUT_OF_MEMORY_COUNT = Path("/proc/vmstat")


@dataclass(eq=False)
class _Worker:
    """A worker process and the connections to it."""

    process: subprocess.Popen[bytes]
    channels: Sequence[Channel]
    callers: Mapping[str, RemoteCaller]
    num_oom_kills: int | None
    """Processes that the system had killed for lack of memory when this one started."""
    beats: socket.socket
    loaded: dict[str, ModelInfo] = field(default_factory=dict)
    """The base models in its memory."""
    exited: threading.Event = field(default_factory=threading.Event)
    answered: bool = False
    num_missed: int = 0
    """Heartbeats missed in a row."""

    @property
    def state(self) -> str:
        """Its state, as :class:`WorkerStatus` names it."""
        if self.num_missed:
            return "silent"
        return "running" if self.answered else "starting"

    def close(self) -> None:
        """Close the connections to it."""
        for channel in self.channels:
            channel.close()
        with contextlib.suppress(OSError):  # it has exited, and the monitor has closed this
            self.beats.shutdown(socket.SHUT_RDWR)

    def loss(self) -> WorkerLost:
        """Why it exited; kills it if it has not, because it cannot be reached any more."""
        if not self.exited.wait(EXIT_TIMEOUT_S):
            self.process.kill()
            self.exited.wait()
        code = self.process.returncode
        if self.num_missed >= heartbeat.MAX_MISSED:
            return WorkerLost(
                f"it was killed after {_silence_s(self.num_missed)} s without a heartbeat", own_fault=True
            )
        if code >= 0:
            return WorkerLost(f"it exited with code {code}", own_fault=True)
        name = signal.Signals(-code).name
        if code != -signal.SIGKILL:
            return WorkerLost(f"it was terminated by {name}", own_fault=True)
        num_oom_kills = _out_of_memory_kills()
        if num_oom_kills is None or self.num_oom_kills is None:
            return WorkerLost(
                f"it was terminated by {name}, from outside or because memory ran out", own_fault=False
            )
        if num_oom_kills == self.num_oom_kills:
            return WorkerLost(f"it was terminated by {name} from outside", own_fault=False)
        return WorkerLost(f"it was terminated by {name}, probably because memory ran out", own_fault=True)


class ProcessBackend(RemoteBackend):
    """Computes in a worker process.

    Example:
        >>> backend = ProcessBackend(config, Callbacks(None, on_exit=loop.wake, on_silence=print))
        >>> backend.start()
        >>> backend.load("tiny").arch.family
        'llama'
        >>> backend.close()
    """

    def __init__(self, config: EngineConfig, callbacks: Callbacks) -> None:
        super().__init__(config, callbacks)
        self._worker: _Worker | None = None
        self._spawns: queue.SimpleQueue[tuple[list[socket.socket], Future[subprocess.Popen[bytes]]] | None]
        self._spawns = queue.SimpleQueue()
        # The system kills a worker when the thread that started it exits, so that thread does nothing else.
        self._spawner = threading.Thread(target=self._spawn_all, name="tinkex-spawner", daemon=True)
        self._spawner.start()

    # ---- the process

    @property
    def status(self) -> WorkerStatus:
        """The worker process."""
        worker = self._worker
        if worker is None or worker.exited.is_set():
            return self._absent
        return self._status(worker.process.pid, worker.state)

    def start(self) -> None:
        """Start a worker; returns as soon as the process exists."""
        if self._worker is not None:
            self._worker.close()
        pairs = [socket.socketpair() for _ in (*CONNECTIONS, "beats")]
        theirs = [pair[1] for pair in pairs]
        started: Future[subprocess.Popen[bytes]] = Future()
        num_oom_kills = _out_of_memory_kills()
        self._spawns.put((theirs, started))
        try:
            process = started.result()
        except OSError as error:
            for pair in pairs:
                pair[0].close()
            raise WorkerLost(f"it cannot be started ({error})", own_fault=False) from error
        finally:
            for end in theirs:
                end.close()
        *ours, beats = [pair[0] for pair in pairs]
        channels = [Channel(connection) for connection in ours]
        callers = {
            name: RemoteCaller(each, self._callbacks.progress)
            for name, each in zip(CONNECTIONS, channels, strict=True)
        }
        worker = _Worker(process, channels, callers, num_oom_kills, beats)
        threading.Thread(target=self._wait, args=(worker,), name="tinkex-wait", daemon=True).start()
        threading.Thread(target=self._monitor, args=(worker,), name="tinkex-heartbeat", daemon=True).start()
        self._num_started += 1
        self._worker = worker
        # If it has exited already, the next call to it reports that.
        with contextlib.suppress(OSError):
            channels[0].send(self._settings())

    def check(self) -> None:
        """Raise :class:`WorkerLost` if the worker has exited."""
        self._current()

    def _current(self) -> _Worker:
        worker = self._worker
        if worker is None:
            raise WorkerLost("it was not started", own_fault=False)
        if worker.exited.is_set():
            raise worker.loss()
        return worker

    def close(self) -> None:
        """Stop the worker, and wait until it has exited."""
        self._closed = True
        if self._worker is not None:
            self._worker.close()
            self._worker.loss()
        self._spawns.put(None)

    def _spawn_all(self) -> None:
        # A process starts with the signals blocked that its parent's thread blocks: these wait until it ignores them.
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        while (order := self._spawns.get()) is not None:
            ends, started = order
            try:
                started.set_result(_spawn(ends))
            except OSError as error:
                started.set_exception(error)

    def _wait(self, worker: _Worker) -> None:
        worker.process.wait()
        worker.exited.set()
        if not self._closed:
            self._callbacks.on_exit()

    def _monitor(self, worker: _Worker) -> None:
        def on_change(num_missed: int) -> None:
            worker.num_missed = num_missed
            if num_missed >= heartbeat.MAX_MISSED:
                worker.process.kill()
            elif num_missed <= 1:
                self._callbacks.on_silence(_silent(worker.process.pid) if num_missed else None)

        with worker.beats:
            heartbeat.monitor(worker.beats, worker.exited, on_change)
        if worker.num_missed:
            self._callbacks.on_silence(None)  # it has exited, which is reported separately

    def call(self, connection: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker's backend over one of the connections."""
        with self._calling() as worker:
            return worker.callers[connection].call(name, *args, **kwargs)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[_Worker]:
        """Yields the worker for a call; raises :class:`WorkerLost` if it has exited or exits during the call."""
        worker = self._current()
        try:
            yield worker
        except Disconnected:
            raise worker.loss() from None
        worker.answered = True

    def optim_steps(self, steps: Sequence[tuple[str, AdamParams]], results: list[StepResult]) -> None:
        """Take optimizer steps in the worker, which does not wait for this process between two of them."""
        with self._calling() as worker:
            worker.callers["compute"].call_each("optim_step", steps, results)

    def cast(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the worker's backend without waiting for it."""
        if self._worker is not None:
            self._worker.callers["compute"].cast(name, *args, **kwargs)

    def load(self, source: str) -> ModelInfo:
        """Load a base model in the worker, if it is not loaded there."""
        worker = self._current()
        if source not in worker.loaded:
            worker.loaded[source] = self.call("compute", "load", source)
        return worker.loaded[source]

    # ---- calls, each made in the worker by the method of the same name

    load_weights = called("compute", LocalBackend.load_weights)
    save_weights = called("compute", LocalBackend.save_weights)
    export_weights = called("compute", LocalBackend.export_weights)
    import_weights = called("import", LocalBackend.import_weights)
    write_savepoint = called("write", LocalBackend.write_savepoint)
    restore = called("compute", LocalBackend.restore)
    sample = called("compute", LocalBackend.sample)


def _spawn(ends: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    descriptors = [end.fileno() for end in ends]
    return subprocess.Popen(  # noqa: S603 -- this program itself
        [sys.executable, "-c", _PROGRAM.format(path=sys.path), "tinkex-worker", *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # the server's own output is for the program that started it
        pass_fds=descriptors,
    )


def _silent(pid: int) -> str:
    return (
        f"the worker (process {pid}) does not respond, and is killed and started again if that lasts "
        f"{_silence_s(heartbeat.MAX_MISSED)} s; if it was stopped on purpose, continue it (kill -CONT {pid})"
    )


def _silence_s(num_missed: int) -> str:
    return f"{num_missed * heartbeat.TIMEOUT_S:g}"


def _out_of_memory_kills() -> int | None:
    """How many processes the system has killed because memory ran out, where it reports it."""
    try:
        for line in _OUT_OF_MEMORY_COUNT.read_text(encoding="ascii").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass
    return None
