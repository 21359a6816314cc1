"""The backend on a node of a Ray cluster: an actor there, which monitors a worker process of its node.

No disk is shared: adapters, checkpoints and savepoints travel with the calls, and what a node has written is on the engine's disk
before anything depends on it. An actor is never restarted by Ray, and no call is repeated by it: a lost actor is the loss of
the lane, its successor is a new incarnation, and the journal decides what runs again.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.engine.lanes import heartbeat
from tinkex.engine.lanes.file_values import model_digests, read_files, write_files
from tinkex.engine.lanes.interface import CorruptState, ModelInfo, StepResult, WorkerLost, WorkerStatus
from tinkex.engine.lanes.messages import ERROR
from tinkex.engine.lanes.ray_actor import Message, MissingAdapters, NodeModel, NodeVersions
from tinkex.engine.lanes.ray_cluster import ActorLost
from tinkex.engine.store import file_digest
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.lanes.interface import (
        DecodeReport,
        DecodeStep,
        PassJob,
        PassReport,
        ShardTask,
    )
    from tinkex.engine.lanes.ray_actor import Beat
    from tinkex.engine.lanes.ray_cluster import RayCluster
    from tinkex.engine.model.adapter_copy import AdapterCopy
    from tinkex.engine.model.progress import Progress
    from tinkex.engine.store import SavepointRow
    from tinkex.engine.trainer.shards import ShardResult
    from tinkex.types import AdamParams, CreateCustomLossRequest, LoraConfig

logger = logging.getLogger("tinkex.engine")

START_TIMEOUT_S = 120.0
"""How long it may take until an actor has a place on a node and has started."""
CHECK_S = 0.2
"""How often a call that runs looks whether its actor was lost."""
CLOSE_TIMEOUT_S = 5.0
"""How long an actor may take to end its worker and to delete its files."""
DECODE_S = 0.02
"""How long an actor takes decode steps in one call: a call costs about a millisecond."""


@dataclass(eq=False)
class _Actor:
    """One incarnation of the lane's actor."""

    handle: Any
    incarnation: int
    lost: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    beat: Beat | None = None
    num_missed: int = 0
    loaded: dict[str, ModelInfo] = field(default_factory=dict)
    """The base models in its worker's memory."""
    worker_lost: bool = False
    """Whether its worker was lost, so that only that has to be started again."""

    def loss(self) -> WorkerLost:
        """Why it was lost."""
        return WorkerLost(self.reason, own_fault=False)


class RayBackend:
    """Computes on a node of a cluster; see :class:`~tinkex.engine.lanes.in_process.LocalBackend`.

    ``on_exit`` and ``on_silence`` are called like those of :class:`~tinkex.engine.lanes.worker_process.ProcessBackend`.

    Example:
        >>> backend = RayBackend(cluster, "trainer-0", config, None, on_exit=loop.wake, on_silence=print)
        >>> backend.start()
        >>> backend.load("tiny").arch.family
        'llama'
        >>> backend.close()
    """

    def __init__(
        self,
        cluster: RayCluster,
        name: str,
        config: EngineConfig,
        progress: Progress | None,
        on_exit: Callable[[], None],
        on_silence: Callable[[str | None], None],
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._config = config
        self._progress = progress
        self._on_exit = on_exit
        self._on_silence = on_silence
        self._actor: _Actor | None = None
        self._num_started = 0
        self._closed = False
        self._casts: list[tuple[str, tuple[Any, ...]]] = []
        """Calls whose results nobody waits for; they travel with the next one."""

    # ---- the actor

    @property
    def status(self) -> WorkerStatus:
        """The worker process, and the node it runs on."""
        actor, restarts = self._actor, max(0, self._num_started - 1)
        if actor is None or actor.lost.is_set() or actor.worker_lost:
            return WorkerStatus(None, "restarting" if self._num_started else "starting", restarts)
        if actor.beat is None:
            return WorkerStatus(None, "starting", restarts)
        worker = actor.beat.worker
        state = "silent" if actor.num_missed else worker.state
        return WorkerStatus(worker.pid, state, restarts, actor.beat.node)

    def start(self) -> None:
        """Start an actor on some node, or only its worker again if the actor is there."""
        self._num_started += 1
        self._casts.clear()
        actor = self._actor
        if actor is not None and not actor.lost.is_set():
            actor.loaded.clear()
            self._call(actor, "compute", "start")
            actor.worker_lost = False
            return
        try:
            handle = self._cluster.start_actor(self._name, self._settings())
        except Exception as error:
            raise WorkerLost(f"its actor cannot be started ({error})", own_fault=False) from error
        actor = self._actor = _Actor(handle, self._num_started)
        threading.Thread(target=self._monitor, args=(actor,), name="tinkex-beat", daemon=True).start()
        # The actor makes this call before every other one; nothing waits for it.
        self._cluster.call(handle, "call", "compute", pickle.dumps(Message("start", (), {})))

    def check(self) -> None:
        """Raise :class:`WorkerLost` if the worker, its actor or its node is gone."""
        actor = self._current()
        if actor.beat is not None and actor.beat.worker.state == "restarting":
            self._call(actor, "check", "check")

    def close(self) -> None:
        """End the actor, and with it the worker."""
        self._closed = True
        actor = self._actor
        if actor is not None and not actor.lost.is_set():
            with contextlib.suppress(ActorLost):
                self._cluster.wait(self._cluster.call(actor.handle, "close", "beat"), CLOSE_TIMEOUT_S)
            self._end(actor, "it was closed")

    def _settings(self) -> Mapping[str, Any]:
        values = {each.name: getattr(self._config, each.name) for each in fields(self._config)}
        config = {**values, "models": dict(self._config.models)}
        return {"config": config, "log_level": logger.getEffectiveLevel()}

    def _current(self) -> _Actor:
        actor = self._actor
        if actor is None:
            raise WorkerLost("it was not started", own_fault=False)
        if actor.lost.is_set():
            raise actor.loss()
        return actor

    def _end(self, actor: _Actor, reason: str) -> None:
        """Consider an actor lost: nothing that it still does has an effect."""
        if not actor.lost.is_set():
            actor.reason = reason
            actor.lost.set()
        self._cluster.end_actor(actor.handle)

    def _monitor(self, actor: _Actor) -> None:
        """Poll an actor's state until it is lost."""
        started = time.monotonic()
        while not actor.lost.wait(heartbeat.INTERVAL_S if actor.beat is not None else 0):
            try:
                content = self._wait_for_beat(actor)
            except ActorLost as lost:
                self._end(actor, f"its actor or the node was lost ({lost})")
                break
            if content is None and actor.beat is None:
                if time.monotonic() - started > START_TIMEOUT_S:
                    self._end(actor, f"no node had room for it within {START_TIMEOUT_S:g} s")
            elif content is None:
                actor.num_missed += 1
                if actor.num_missed == 1:
                    self._on_silence(
                        f"the lane {self._name} on node {actor.beat.node if actor.beat else ''} does not respond"
                    )
                if actor.num_missed >= heartbeat.MAX_MISSED:
                    self._end(actor, "it did not respond")
            else:
                self._take_beat(actor, content)
        if actor.num_missed:
            self._on_silence(None)
        if not self._closed:
            self._on_exit()

    def _wait_for_beat(self, actor: _Actor) -> bytes | None:
        reference = self._cluster.call(actor.handle, "beat", "beat")
        until = time.monotonic() + heartbeat.TIMEOUT_S
        while not actor.lost.is_set() and (rest := until - time.monotonic()) > 0:
            content: bytes | None = self._cluster.wait(reference, min(rest, CHECK_S))
            if content is not None:
                return content
        return None

    def _take_beat(self, actor: _Actor, content: bytes) -> None:
        beat: Beat = pickle.loads(content)  # noqa: S301 -- sent by our actor
        if actor.num_missed:
            actor.num_missed = 0
            self._on_silence(None)
        had_worker = actor.beat is None or actor.beat.worker.state != "restarting"
        progress = actor.beat.progress if actor.beat is not None else None
        actor.beat = beat
        for values in beat.logs:
            logging.getLogger(values["name"]).handle(logging.makeLogRecord({**values, "lane": self._name}))
        if self._progress is not None and beat.progress is not None and beat.progress != progress:
            self._progress(*beat.progress)
        if had_worker and beat.worker.state == "restarting":
            self._on_exit()

    # ---- calls

    def call(self, connection: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call of the actor in one of its concurrency groups."""
        return self._call(self._current(), connection, name, *args, **kwargs)

    def _call(self, actor: _Actor, connection: str, name: str, *args: Any, **kwargs: Any) -> Any:
        first: Sequence[tuple[str, tuple[Any, ...]]] = ()
        if connection == "compute":
            first, self._casts = self._casts, []
        message = pickle.dumps(Message(name, args, kwargs, first), protocol=5)
        try:
            reference = self._cluster.call(actor.handle, "call", connection, message)
            while (reply := self._cluster.wait(reference, CHECK_S)) is None:
                if actor.lost.is_set():
                    raise actor.loss()
        except ActorLost as lost:
            self._end(actor, f"its actor or the node was lost ({lost})")
            raise actor.loss() from lost
        kind, content = pickle.loads(reply)  # noqa: S301 -- sent by our actor
        if kind == ERROR:
            actor.worker_lost = actor.worker_lost or isinstance(content, WorkerLost)
            raise content
        return content

    def _cast(self, name: str, *args: Any) -> None:
        """Make a call with the next one, before it."""
        self._casts.append((name, args))

    def load(self, source: str) -> ModelInfo:
        """Load a base model on the node, if it is not loaded there; its files must be those that the engine has."""
        actor = self._current()
        if source not in actor.loaded:
            loaded: NodeModel = self._call(actor, "compute", "load", source)
            actor.loaded[source] = self._checked(actor, source, loaded)
        return actor.loaded[source]

    def _checked(self, actor: _Actor, source: str, loaded: NodeModel) -> ModelInfo:
        from tinkex.engine.model.catalog import resolve

        node = f"node {actor.beat.node}" if actor.beat is not None else "the node"
        if actor.beat is not None and actor.beat.versions != (here := NodeVersions.here()):
            raise SetupError(
                f"{node} has {actor.beat.versions}, and the server {here}; install the same versions on both"
            )
        directory = resolve(source, self._config.models_home, self._progress)
        ours = model_digests(directory)
        different = sorted(
            name for name in {*ours, *loaded.digests} if ours.get(name) != loaded.digests.get(name)
        )
        if different:
            raise SetupError(
                f"{node} has other files of the model {source} than the server: {', '.join(different)}; copy the directory "
                "to the node, or download the same revision on both"
            )
        return replace(loaded.info, directory=directory)

    def check_loss(self, request: CreateCustomLossRequest) -> None:
        """Raise ``InvalidInput`` for an uploaded loss that cannot be run."""
        self.call("check", "check_loss", request)

    def create(self, run_id: str, source: str, lora: LoraConfig) -> None:
        """Create a run in memory."""
        self.call("compute", "create", run_id, source, lora)

    def forget(self, run_id: str) -> None:
        """Drop a run from memory, if it is there."""
        self._cast("forget", run_id)

    def run_pass(self, jobs: Sequence[PassJob], *, share_prefixes: bool) -> Sequence[PassReport] | None:
        """Run passes of runs of one base model together."""
        reports: Sequence[PassReport] | None = self.call(
            "compute", "run_pass", jobs, share_prefixes=share_prefixes
        )
        return reports

    def resume_pass(self) -> Sequence[PassReport] | None:
        """Continue with the suspended pass."""
        reports: Sequence[PassReport] | None = self.call("compute", "resume_pass")
        return reports

    def begin_shards(
        self, job: PassJob, shards: Sequence[Sequence[int]], *, share_prefixes: bool, threads: int
    ) -> None:
        """Begin a pass that is computed in shards."""
        self.call("compute", "begin_shards", job, shards, share_prefixes=share_prefixes, threads=threads)

    def compute_shard(self, number: int) -> bool:
        """Compute a shard of the pass that was begun."""
        succeeded: bool = self.call("compute", "compute_shard", number)
        return succeeded

    def add_shard(self, number: int, result: ShardResult) -> None:
        """Add a shard that another trainer has computed."""
        self.call("compute", "add_shard", number, result)

    def end_shards(self) -> PassReport | None:
        """Add the gradient of all shards to the run."""
        report: PassReport | None = self.call("compute", "end_shards")
        return report

    def discard_shards(self) -> None:
        """Discard the pass that was begun."""
        self._cast("discard_shards")

    def copy_adapter(self, run_id: str, key: str) -> AdapterCopy:
        """The weights of a run by value."""
        copy: AdapterCopy = self.call("write", "copy_adapter", run_id, key)
        return copy

    def keep_copy(self, source: str, copy: AdapterCopy) -> None:
        """Keep the weights of a run of another trainer on the node."""
        self.call("compute", "keep_copy", source, copy)

    def drop_copy(self, key: str) -> None:
        """Drop the weights of a run of another trainer."""
        self._cast("drop_copy", key)

    def run_shard(self, task: ShardTask) -> ShardResult | None:
        """Compute a shard of another trainer."""
        result: ShardResult | None = self.call("compute", "run_shard", task)
        return result

    def optim_steps(self, steps: Sequence[tuple[str, AdamParams]], results: list[StepResult]) -> None:
        """Take optimizer steps on the node; none counts if it is lost before the last."""
        results += self.call("compute", "optim_steps", steps)

    def load_weights(self, run_id: str, directory: Path, *, optimizer: bool) -> None:
        """Replace the state of a run by a checkpoint."""
        self.call("compute", "load_weights", run_id, read_files(directory), optimizer=optimizer)

    def save_weights(self, run_id: str, directory: Path, base_model: str, *, optimizer: bool) -> None:
        """Write a checkpoint of a run into a directory."""
        write_files(directory, self.call("compute", "save_weights", run_id, base_model, optimizer=optimizer))

    def export_weights(
        self, run_id: str, directory: Path, base_model: str, recipients: Sequence[str] | None
    ) -> None:
        """Write the weights of a run for use elsewhere into a directory."""
        write_files(directory, self.call("compute", "export_weights", run_id, base_model, recipients))

    def import_weights(
        self, source: Path, directory: Path, base: Path, base_model: str, lora: LoraConfig
    ) -> None:
        """Validate uploaded weights and write them as a checkpoint into a directory."""
        actor = self._current()
        model = next((name for name, info in actor.loaded.items() if info.directory == base), str(base))
        written = self.call("import", "import_weights", read_files(source), model, base_model, lora)
        write_files(directory, written)

    def capture(self, run_id: str) -> int:
        """Copy the exact state of a run on the node."""
        number: int = self.call("compute", "capture", run_id)
        return number

    def write_savepoint(self, capture: int, file: Path) -> bytes:
        """Write a captured state into a file; returns the file's digest."""
        digest, content = self.call("write", "write_savepoint", capture)
        file.write_bytes(content)
        if file_digest(file) != digest:
            raise OSError(f"the savepoint {file} is not what the node sent")
        kept: bytes = digest
        return kept

    def restore(self, source: str, savepoint: SavepointRow) -> None:
        """Restore a run from its savepoint."""
        try:
            content = (self._config.engine_dir / savepoint.file).read_bytes()
        except FileNotFoundError:
            content = None
        except OSError as error:
            raise CorruptState(f"its savepoint {savepoint.file} cannot be read ({error})") from error
        self.call("compute", "restore", source, savepoint, content)

    def keep_adapter(self, run_id: str, directory: str) -> None:
        """Cache the current adapter of a run as the contents of a directory."""
        self._cast("keep_adapter", run_id, directory)

    def drop_adapter(self, directory: str) -> None:
        """Drop a cached adapter whose directory is being deleted."""
        self._cast("drop_adapter", directory)

    def sample(self, source: str, step: DecodeStep) -> DecodeReport:
        """Take decode steps of a base model for a moment; the files of adapters that the node lacks are sent."""
        report: DecodeReport | MissingAdapters = self.call("compute", "sample", source, step, {}, DECODE_S)
        if isinstance(report, MissingAdapters):
            files = {directory: self._adapter_files(directory) for directory in report.directories}
            report = self.call("compute", "sample", source, step, files, DECODE_S)
        assert not isinstance(report, MissingAdapters), "the files were sent"
        return report

    def _adapter_files(self, directory: str) -> Mapping[str, bytes]:
        try:
            return read_files(self._config.engine_dir / directory)
        except OSError:
            return {}  # deleted: the node's sampler says so, for the samples that need it
