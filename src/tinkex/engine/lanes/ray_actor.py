"""The actor of a lane on a node of a Ray cluster: a worker process there, whose files travel as values.

The actor itself computes nothing. It starts and monitors the worker of its node, as the engine does with one on its own
machine, so that a crash of the worker is told apart from the loss of the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import platform
import shutil
import socket
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from tinkex._version import __version__
from tinkex.engine.config import EngineConfig, tinkex_home
from tinkex.engine.lanes.file_values import model_digests, read_files, write_files
from tinkex.engine.lanes.interface import (
    DecodeReport,
    DecodeStep,
    ModelInfo,
    StepResult,
    WorkerLost,
    WorkerStatus,
)
from tinkex.engine.lanes.messages import ERROR, record_values, run_call
from tinkex.engine.lanes.remote import Callbacks
from tinkex.engine.lanes.worker_process import ProcessBackend

if TYPE_CHECKING:
    from tinkex.engine.store import SavepointRow
    from tinkex.types import AdamParams, LoraConfig

MAX_ADAPTERS_ON_DISK = 64
MAX_LOG_RECORDS = 1000
FOLDER = "tinkex-lane-"
LOCK_FILE = "lock"
SAVEPOINT = "savepoint"


Cast: TypeAlias = tuple[str, tuple[Any, ...], Mapping[str, Any]]
"""A call whose result nobody waits for: its name, arguments and keyword arguments."""


@dataclass(frozen=True)
class NodeVersions:
    """What must be the same on every machine of an engine."""

    tinkex: str
    torch: str
    python: str

    @classmethod
    def here(cls) -> NodeVersions:
        """Those of this process."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "not installed"
        return cls(__version__, torch, ".".join(platform.python_version_tuple()[:2]))


@dataclass(frozen=True)
class Beat:
    """An actor's answer to a heartbeat."""

    node: str
    """The address of the node."""
    versions: NodeVersions
    worker: WorkerStatus
    progress: tuple[str, int, int | None] | None
    """The last progress of what it does."""
    logs: Sequence[Mapping[str, Any]]
    """The log records since the last beat."""


@dataclass(frozen=True)
class Message:
    """A call of the engine, after others whose results nobody waits for."""

    incarnation: int
    """How often the lane's worker had been started: a call for an earlier one is rejected."""
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    first: Sequence[Cast] = ()


@dataclass(frozen=True)
class NodeModel:
    """A model that a node has loaded, and the digests of its files."""

    info: ModelInfo
    digests: Mapping[str, str]


@dataclass(frozen=True)
class MissingAdapters:
    """A decode step was not taken, because the node has no files of these adapters."""

    directories: Sequence[str]


class LaneActor:
    """Runs on a node; each connection of the engine has a concurrency group, so its calls are made one after the other.

    Example:
        >>> actor = ray.remote(LaneActor).remote(pickle.dumps({"config": {}, "log_level": "WARNING"}))
        >>> pickle.loads(ray.get(actor.call.remote(pickle.dumps(Message(1, "start", (), {})))))
        ('result', None)
    """

    def __init__(self, settings: bytes) -> None:
        content = pickle.loads(settings)  # noqa: S301 -- sent by the engine, which is this program
        # Ray sets it to the CPUs that are reserved; the configuration has the number of threads.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._folder, self._lock = _own_folder()
        values = dict(content["config"])
        if not Path(values["home"]).is_dir():  # another machine may have another layout
            values["home"] = tinkex_home()
        config = EngineConfig(**{**values, "data_dir": self._folder, "worker": "process"})
        self._logs: deque[Mapping[str, Any]] = deque(maxlen=MAX_LOG_RECORDS)
        logging.getLogger("tinkex").addHandler(_Records(self._logs))
        logging.getLogger("tinkex").setLevel(content["log_level"])
        self._progress: tuple[str, int, int | None] | None = None
        self._incarnation = 0
        self._node = _node_address()
        self._versions = NodeVersions.here()
        self._backend = ProcessBackend(config, Callbacks(self._show, lambda: None, self._silence))
        self._files = NodeFiles(self._backend, self._folder, config.models_home)

    def call(self, message: bytes) -> bytes:
        """Makes the calls of a pickled :class:`Message`; returns the kind and content of the last one's result."""
        asked: Message = pickle.loads(message)  # noqa: S301 -- sent by the engine
        if asked.name == "start":
            self._incarnation = asked.incarnation
        elif asked.incarnation != self._incarnation:
            # It waited for its turn while the worker that it was made for was lost.
            lost = WorkerLost("the worker that the call was for was lost", own_fault=False)
            return pickle.dumps((ERROR, lost), protocol=5)
        for name, args, kwargs in asked.first:
            run_call(self._method(name), args, dict(kwargs))
        return pickle.dumps(run_call(self._method(asked.name), asked.args, dict(asked.kwargs)), protocol=5)

    def beat(self) -> bytes:
        """Returns a pickled :class:`Beat`."""
        logs = [self._logs.popleft() for _ in range(len(self._logs))]
        return pickle.dumps(Beat(self._node, self._versions, self._backend.status, self._progress, logs))

    def close(self) -> None:
        """Ends the worker, and deletes the folder."""
        self._backend.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _method(self, name: str) -> Any:
        return getattr(self._files, name, None) or getattr(self._backend, name)

    def _show(self, phase: str, done: int, total: int | None) -> None:
        self._progress = phase, done, total

    def _silence(self, description: str | None) -> None:
        if description is not None:
            logging.getLogger("tinkex.engine").warning(description)


class NodeFiles:
    """The calls of a backend that read or write files, with the files as values. The folder is the node's own."""

    def __init__(self, backend: ProcessBackend, folder: Path, models_home: Path) -> None:
        self._backend = backend
        self._folder = folder
        self._models_home = models_home
        self._adapters: OrderedDict[str, None] = OrderedDict()
        """The adapters whose files are in the folder, the last used one at the end."""

    def load(self, source: str) -> NodeModel:
        """Loads a base model; returns the digests of its files too."""
        info = self._backend.load(source)
        return NodeModel(info, model_digests(info.directory))

    def optim_steps(self, steps: Sequence[tuple[str, AdamParams]]) -> Sequence[StepResult]:
        """Takes optimizer steps; returns the result of each, fewer if the worker was lost."""
        results: list[StepResult] = []
        self._backend.optim_steps(steps, results)
        return results

    def load_weights(self, run_id: str, files: Mapping[str, bytes], *, optimizer: bool) -> None:
        """Replaces the state of a run by a checkpoint."""
        with self._temporary() as directory:
            write_files(directory, files)
            self._backend.load_weights(run_id, directory, optimizer=optimizer)

    def save_weights(self, run_id: str, base_model: str, *, optimizer: bool) -> Mapping[str, bytes]:
        """Returns the files of a checkpoint of a run."""
        with self._temporary() as directory:
            self._backend.save_weights(run_id, directory, base_model, optimizer=optimizer)
            return read_files(directory)

    def export_weights(
        self, run_id: str, base_model: str, recipients: Sequence[str] | None
    ) -> Mapping[str, bytes]:
        """Returns the files of the weights of a run for use elsewhere."""
        with self._temporary() as directory:
            self._backend.export_weights(run_id, directory, base_model, recipients)
            return read_files(directory)

    def import_weights(
        self, files: Mapping[str, bytes], source: str, base_model: str, lora: LoraConfig
    ) -> Mapping[str, bytes]:
        """Validates uploaded weights; returns the files of the checkpoint."""
        from tinkex.engine.model.catalog import resolve

        with self._temporary() as uploaded, self._temporary() as directory:
            write_files(uploaded, files)
            base = resolve(source, self._models_home)
            self._backend.import_weights(uploaded, directory, base, base_model, lora)
            return read_files(directory)

    def write_savepoint(self, capture: int) -> tuple[bytes, bytes]:
        """Returns the digest and the content of the savepoint file of a captured state."""
        with self._temporary() as directory:
            digest = self._backend.write_savepoint(capture, directory / SAVEPOINT)
            return digest, (directory / SAVEPOINT).read_bytes()

    def restore(self, source: str, savepoint: SavepointRow, content: bytes | None) -> None:
        """Restores a run from the content of its savepoint file; None is a file that is missing."""
        file = self._folder / savepoint.file
        file.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            file.write_bytes(content)
        try:
            self._backend.restore(source, savepoint)
        finally:
            file.unlink(missing_ok=True)

    def sample(
        self,
        source: str,
        step: DecodeStep,
        adapters: Mapping[str, Mapping[str, bytes]],
        max_s: float,
    ) -> DecodeReport | MissingAdapters:
        """Takes decode steps until a sample ends or the time is over; the first one joins samples, with the files of their adapters."""
        for directory, files in adapters.items():
            self._drop(directory)
            if files:  # without files the adapter was deleted, which the sampler reports
                write_files(self._folder / directory, files)
            self._adapters[directory] = None
        wanted = {added.directory for added in step.add if added.directory is not None}
        missing = [directory for directory in wanted if directory not in self._adapters]
        if missing:
            return MissingAdapters(missing)
        until = time.monotonic() + max_s
        report = self._backend.sample(source, step)
        deltas = list(report.deltas)
        while not report.ended and report.batch.num_sequences and time.monotonic() < until:
            report = self._backend.sample(source, DecodeStep())
            deltas += report.deltas
        for directory in wanted:
            self._adapters.move_to_end(directory)
        while len(self._adapters) > MAX_ADAPTERS_ON_DISK:
            self._drop(next(iter(self._adapters)))
        return DecodeReport(report.ended, deltas, report.batch)

    def drop_adapter(self, directory: str) -> None:
        """Drops an adapter whose directory is being deleted."""
        self._drop(directory)
        self._backend.drop_adapter(directory)

    def _drop(self, directory: str) -> None:
        self._adapters.pop(directory, None)
        shutil.rmtree(self._folder / directory, ignore_errors=True)

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            yield Path(name)


def _own_folder() -> tuple[Path, IO[bytes]]:
    """Makes a folder for the files of this actor, locked while its process lives; deletes those of actors that were killed."""
    root = Path(tempfile.gettempdir())
    for folder in root.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                with (folder / LOCK_FILE).open("rb") as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".new-{FOLDER}"))
    lock = (made / LOCK_FILE).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(root / made.name.removeprefix(".new-")), lock


def _node_address() -> str:
    """The address that the cluster knows this machine by."""
    try:
        from ray.util import get_node_ip_address  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:  # the actor runs without a cluster
        return socket.gethostname()
    return str(get_node_ip_address())


class _Records(logging.Handler):
    """Keeps log records until the engine fetches them."""

    def __init__(self, records: deque[Mapping[str, Any]]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, unless it has come from a lane."""
        if not hasattr(record, "lane"):
            self._records.append(record_values(record))
