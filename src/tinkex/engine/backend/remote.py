"""Computing in a worker process: started, watched and, when it died, started again.

The worker runs :class:`~tinkex.engine.backend.local.LocalBackend`; this end has the same methods and passes them on. Three
connections lead to it, so that a long pass holds up neither a savepoint that is being written nor a check; a fourth one
carries signs of life.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.engine.backend import pulse
from tinkex.engine.backend.calls import Caller, Disconnected
from tinkex.engine.backend.channel import Channel
from tinkex.engine.backend.seam import (
    Checkpoint,
    ModelFacts,
    PassJob,
    PassResult,
    SampleReport,
    SampleStep,
    SavedFile,
    WorkerDied,
    WorkerStatus,
)

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.progress import Progress
    from tinkex.types import AdamParams, CreateCustomLossRequest, LoraConfig

logger = logging.getLogger("tinkex.engine")

ENDING_S = 5.0
"""How long a worker whose connections are closed may take to end."""
LANES = ("compute", "write", "check")
NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what a service manager sends to all at once, are for the engine, which ends its worker itself."""

_PROGRAM = "import sys; sys.path[:] = {path!r}; from tinkex.engine.backend.child import main; main()"
_OUT_OF_MEMORY_COUNT = Path("/proc/vmstat")


@dataclass(eq=False)
class _Child:
    """A worker process and the connections to it."""

    process: subprocess.Popen[bytes]
    channels: Sequence[Channel]
    callers: Mapping[str, Caller]
    kills_before: int | None
    beats: socket.socket
    exited: threading.Event = field(default_factory=threading.Event)
    answered: bool = False
    silences: int = 0

    @property
    def state(self) -> str:
        """What it is doing, as :class:`WorkerStatus` names it."""
        if self.silences:
            return "silent"
        return "running" if self.answered else "starting"

    def close(self) -> None:
        """Close the connections to it."""
        for channel in self.channels:
            channel.close()
        with contextlib.suppress(OSError):  # it is gone, and whoever listens has closed this
            self.beats.shutdown(socket.SHUT_RDWR)

    def death(self) -> WorkerDied:
        """Why it is gone; it ends here if it is not, for nobody can reach it any more."""
        if not self.exited.wait(ENDING_S):
            self.process.kill()
            self.exited.wait()
        code = self.process.returncode
        if self.silences >= pulse.MOST_SILENCES:
            return WorkerDied(
                f"it was ended after {_silence_s(self.silences)} s without a sign of life", own_fault=True
            )
        if code >= 0:
            return WorkerDied(f"it ended with exit code {code}", own_fault=True)
        name = signal.Signals(-code).name
        if code != -signal.SIGKILL:
            return WorkerDied(f"it was ended by {name}", own_fault=True)
        kills = _out_of_memory_kills()
        if kills is None or self.kills_before is None:
            return WorkerDied(
                f"it was ended by {name}, from outside or because memory ran out", own_fault=False
            )
        if kills == self.kills_before:
            return WorkerDied(f"it was ended by {name} from outside", own_fault=False)
        return WorkerDied(f"it was ended by {name}, probably because memory ran out", own_fault=True)


class ProcessBackend:
    """Has a worker process compute; see :class:`~tinkex.engine.backend.seam.Backend`.

    ``on_death`` is called, on a thread of its own, whenever the worker has gone, and ``on_silence`` with what is to be told
    when it shows no sign of life, or None when it does again.

    Example:
        >>> backend = ProcessBackend(config, progress=None, on_death=engine.wake, on_silence=print)
        >>> backend.start()
        >>> backend.load("tiny").arch.family
        'llama'
        >>> backend.close()
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None,
        on_death: Callable[[], None],
        on_silence: Callable[[str | None], None],
    ) -> None:
        self._config = config
        self._progress = progress
        self._on_death = on_death
        self._on_silence = on_silence
        self._child: _Child | None = None
        self._num_started = 0
        self._closed = False
        self._orders: queue.SimpleQueue[tuple[list[socket.socket], Future[subprocess.Popen[bytes]]] | None]
        self._orders = queue.SimpleQueue()
        # The system ends a worker with the thread that started it, so that thread does nothing else, to the end.
        self._supervisor = threading.Thread(target=self._supervise, name="tinkex-supervisor", daemon=True)
        self._supervisor.start()

    # ---- its life

    @property
    def status(self) -> WorkerStatus:
        """The process that computes."""
        child, restarts = self._child, max(0, self._num_started - 1)
        if child is None or child.exited.is_set():
            return WorkerStatus(None, "restarting" if self._num_started else "starting", restarts)
        return WorkerStatus(child.process.pid, child.state, restarts)

    def start(self) -> None:
        """Start a worker; returns as soon as the process is there."""
        if self._child is not None:
            self._child.close()
        pairs = [socket.socketpair() for _ in (*LANES, "beats")]
        theirs = [pair[1] for pair in pairs]
        started: Future[subprocess.Popen[bytes]] = Future()
        kills = _out_of_memory_kills()
        self._orders.put((theirs, started))
        try:
            process = started.result()
        except OSError as error:
            for pair in pairs:
                pair[0].close()
            raise WorkerDied(f"it cannot be started ({error})", own_fault=False) from error
        finally:
            for end in theirs:
                end.close()
        *lanes, beats = [pair[0] for pair in pairs]
        channels = [Channel(lane) for lane in lanes]
        callers = {name: Caller(each, self._progress) for name, each in zip(LANES, channels, strict=True)}
        child = _Child(process, channels, callers, kills, beats)
        threading.Thread(target=self._wait, args=(child,), name="tinkex-watch", daemon=True).start()
        threading.Thread(target=self._listen, args=(child,), name="tinkex-pulse", daemon=True).start()
        self._num_started += 1
        self._child = child
        try:
            channels[0].send(_settings(self._config))
        except OSError:
            raise child.death() from None

    def check(self) -> None:
        """Raise :class:`WorkerDied` if the worker is gone."""
        if self._child is None:
            raise WorkerDied("it was not started", own_fault=False)
        if self._child.exited.is_set():
            raise self._child.death()

    def close(self) -> None:
        """End the worker, and wait until it is gone."""
        self._closed = True
        if self._child is not None:
            self._child.close()
            self._child.death()
        self._orders.put(None)

    def _supervise(self) -> None:
        # A process begins with the signals blocked that its parent's thread blocks: these wait until it ignores them.
        signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_WORKERS)
        while (order := self._orders.get()) is not None:
            ends, started = order
            try:
                started.set_result(_spawn(ends))
            except OSError as error:
                started.set_exception(error)

    def _wait(self, child: _Child) -> None:
        child.process.wait()
        child.exited.set()
        if not self._closed:
            self._on_death()

    def _listen(self, child: _Child) -> None:
        def note(silences: int) -> None:
            child.silences = silences
            if silences >= pulse.MOST_SILENCES:
                child.process.kill()
            elif silences <= 1:
                self._on_silence(_silent(child.process.pid) if silences else None)

        with child.beats:
            pulse.listen(child.beats, child.exited, note)
        if child.silences:
            self._on_silence(None)  # it is gone, which is told by itself

    def _call(self, lane: str, name: str, *args: Any, **kwargs: Any) -> Any:
        self.check()
        child = self._child
        assert child is not None
        try:
            result = child.callers[lane].call(name, *args, **kwargs)
        except Disconnected:
            raise child.death() from None
        child.answered = True
        return result

    def _tell(self, name: str, *args: Any) -> None:
        if self._child is not None:
            self._child.callers["compute"].tell(name, *args)

    # ---- what it does

    def load(self, source: str) -> ModelFacts:
        """Bring a base model into the worker's memory, if it is not there."""
        facts: ModelFacts = self._call("compute", "load", source)
        return facts

    def check_loss(self, request: CreateCustomLossRequest) -> None:
        """Refuse an uploaded loss that cannot be run; from any thread."""
        self._call("check", "check_loss", request)

    def create(
        self, run_id: str, source: str, lora: LoraConfig, checkpoint: Checkpoint | None = None
    ) -> None:
        """Put a run into memory, fresh or as a checkpoint has it."""
        self._call("compute", "create", run_id, source, lora, checkpoint)

    def forget(self, run_id: str) -> None:
        """Drop a run from memory, if it is there."""
        self._tell("forget", run_id)

    def run_pass(self, jobs: Sequence[PassJob]) -> Sequence[PassResult]:
        """Run passes of runs of one base model together; each fails or succeeds alone."""
        results: Sequence[PassResult] = self._call("compute", "run_pass", jobs)
        return results

    def optim_step(self, run_id: str, params: AdamParams) -> dict[str, float]:
        """One optimizer step of a run; returns its metrics."""
        metrics: dict[str, float] = self._call("compute", "optim_step", run_id, params)
        return metrics

    def load_weights(self, run_id: str, checkpoint: Checkpoint) -> None:
        """Put a checkpoint in the place of what a run has."""
        self._call("compute", "load_weights", run_id, checkpoint)

    def save_weights(self, run_id: str, directory: Path, base_model: str, *, optimizer: bool) -> None:
        """Write a checkpoint of a run into a directory."""
        self._call("compute", "save_weights", run_id, directory, base_model, optimizer=optimizer)

    def export_weights(
        self, run_id: str, directory: Path, base_model: str, recipients: Sequence[str] | None
    ) -> None:
        """Write the weights of a run for use elsewhere into a directory."""
        self._call("compute", "export_weights", run_id, directory, base_model, recipients)

    def capture(self, run_id: str) -> int:
        """Take the exact state of a run; the number stands for it until it is written."""
        number: int = self._call("compute", "capture", run_id)
        return number

    def write_savepoint(self, capture: int, file: Path) -> bytes:
        """Write what was captured into a file; returns the file's digest. Passes go on meanwhile."""
        digest: bytes = self._call("write", "write_savepoint", capture, file)
        return digest

    def restore(self, run_id: str, source: str, saved: SavedFile) -> None:
        """Put a run into memory as a savepoint has it, bit for bit."""
        self._call("compute", "restore", run_id, source, saved)

    def keep_adapter(self, run_id: str, directory: str) -> None:
        """Remember that a directory holds the adapter that a run has at the moment."""
        self._tell("keep_adapter", run_id, directory)

    def drop_adapter(self, directory: str) -> None:
        """Forget an adapter whose directory is being deleted."""
        self._tell("drop_adapter", directory)

    def sample(self, source: str, step: SampleStep) -> SampleReport:
        """One step of the samples of a base model: one message there, one back."""
        report: SampleReport = self._call("compute", "sample", source, step)
        return report


def _spawn(ends: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    descriptors = [end.fileno() for end in ends]
    return subprocess.Popen(  # noqa: S603 -- this program itself
        [sys.executable, "-c", _PROGRAM.format(path=sys.path), "tinkex-worker", *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # what the server says there is for whoever started it
        pass_fds=descriptors,
    )


def _silent(pid: int) -> str:
    return (
        f"the worker (process {pid}) shows no sign of life, and is ended and started again if that lasts "
        f"{_silence_s(pulse.MOST_SILENCES)} s; if it was stopped on purpose, let it go on (kill -CONT {pid})"
    )


def _silence_s(silences: int) -> str:
    return f"{silences * pulse.SILENCE_S:g}"


def _settings(config: EngineConfig) -> Mapping[str, Any]:
    """What the worker builds its configuration from, and how much it is to log."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    return {"config": {**values, "models": dict(config.models)}, "log_level": logger.getEffectiveLevel()}


def _out_of_memory_kills() -> int | None:
    """How many processes the system has ended because memory ran out, where it says so."""
    try:
        for line in _OUT_OF_MEMORY_COUNT.read_text(encoding="ascii").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass
    return None
