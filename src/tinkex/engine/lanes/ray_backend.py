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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.engine.lanes import heartbeat
from tinkex.engine.lanes.file_values import model_digests, read_files, write_files
from tinkex.engine.lanes.interface import CorruptState, ModelInfo, StepResult, WorkerLost, WorkerStatus
from tinkex.engine.lanes.messages import ERROR
from tinkex.engine.lanes.ray_actor import Message, MissingAdapters, NodeModel, NodeVersions
from tinkex.engine.lanes.ray_cluster import ActorLost
from tinkex.engine.lanes.remote import Callbacks, RemoteBackend
from tinkex.engine.store import file_digest
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.lanes.interface import DecodeReport, DecodeStep
    from tinkex.engine.lanes.ray_actor import Beat, Cast
    from tinkex.engine.lanes.ray_cluster import Place
    from tinkex.engine.store import SavepointRow
    from tinkex.types import AdamParams, LoraConfig

logger = logging.getLogger("tinkex.engine")

START_TIMEOUT_S = 120.0
"""How long it may take until an actor has a place on a node and has started."""
CHECK_S = 0.2
"""How often a call that runs looks whether its actor was lost."""
CLOSE_TIMEOUT_S = 5.0
"""How long an actor may take to end its worker and to delete its files."""
DECODE_S = 0.02
"""How long an actor takes decode steps in one call: a call costs about a millisecond."""


class OtherNode(SetupError):
    """A node would not give the numbers of the others: it has other versions, or other files of a model."""


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


class RayBackend(RemoteBackend):
    """Computes on a node of a cluster; an elastic lane raises :class:`NoFreeNode` if no node has room for it now.

    Example:
        >>> backend = RayBackend(Place(cluster, spec, {"CPU": 2.0}), config, Callbacks(None, loop.wake, print))
        >>> backend.start()
        >>> backend.load("tiny").arch.family
        'llama'
        >>> backend.close()
    """

    def __init__(self, place: Place, config: EngineConfig, callbacks: Callbacks) -> None:
        super().__init__(config, callbacks)
        self._place = place
        self._cluster = place.cluster
        self._name = place.spec.name
        self._actor: _Actor | None = None
        self._casts: list[Cast] = []
        """Calls whose results nobody waits for; they travel with the next one."""

    # ---- the actor

    @property
    def status(self) -> WorkerStatus:
        """The worker process, and the node it runs on."""
        actor = self._actor
        if actor is None or actor.lost.is_set() or actor.worker_lost:
            return self._absent
        if actor.beat is None:
            return self._status(None, "starting")
        worker = actor.beat.worker
        return self._status(worker.pid, "silent" if actor.num_missed else worker.state, actor.beat.node)

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
            handle = self._place.start_actor(self._settings())
        except WorkerLost:
            raise
        except Exception as error:
            raise WorkerLost(f"its actor cannot be started ({error})", own_fault=False) from error
        actor = self._actor = _Actor(handle, self._num_started)
        threading.Thread(target=self._monitor, args=(actor,), name="tinkex-beat", daemon=True).start()
        # The actor makes this call before every other one; nothing waits for it.
        message = pickle.dumps(Message(self._num_started, "start", (), {}))
        self._cluster.call(handle, "call", "compute", message)

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
                    self._callbacks.on_silence(
                        f"the lane {self._name} on node {actor.beat.node if actor.beat else ''} does not respond"
                    )
                if actor.num_missed >= heartbeat.MAX_MISSED:
                    self._end(actor, "it did not respond")
            else:
                self._take_beat(actor, content)
        if actor.num_missed:
            self._callbacks.on_silence(None)
        if not self._closed:
            self._callbacks.on_exit()

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
            self._callbacks.on_silence(None)
        had_worker = actor.beat is None or actor.beat.worker.state != "restarting"
        progress = actor.beat.progress if actor.beat is not None else None
        actor.beat = beat
        for values in beat.logs:
            logging.getLogger(values["name"]).handle(logging.makeLogRecord({**values, "lane": self._name}))
        if self._callbacks.progress is not None and beat.progress is not None and beat.progress != progress:
            self._callbacks.progress(*beat.progress)
        if had_worker and beat.worker.state == "restarting":
            self._callbacks.on_exit()

    # ---- calls

    def call(self, connection: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call of the actor in one of its concurrency groups."""
        return self._call(self._current(), connection, name, *args, **kwargs)

    def _call(self, actor: _Actor, connection: str, name: str, *args: Any, **kwargs: Any) -> Any:
        first: Sequence[Cast] = ()
        if connection == "compute":
            first, self._casts = self._casts, []
        incarnation = self._num_started
        message = pickle.dumps(Message(incarnation, name, args, kwargs, first), protocol=5)
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
            is_current = incarnation == self._num_started
            actor.worker_lost = actor.worker_lost or (is_current and isinstance(content, WorkerLost))
            raise content
        return content

    def cast(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the worker's backend with the next call, before it."""
        self._casts.append((name, args, kwargs))

    def load(self, source: str) -> ModelInfo:
        """Load a base model on the node, if it is not loaded there; its files must be those that the engine has."""
        actor = self._current()
        if source not in actor.loaded:
            try:
                node = self._checked_node(actor)
                loaded: NodeModel = self._call(actor, "compute", "load", source)
                actor.loaded[source] = self._checked_model(node, source, loaded)
            except OtherNode as error:
                if self._num_started == 1 and not self._place.spec.is_elastic:
                    raise  # at the start of the server
                # Later there are accepted operations: they wait for a node that gives the same numbers.
                self._end(actor, str(error))
                raise WorkerLost(str(error), own_fault=True) from error
        return actor.loaded[source]

    def _checked_node(self, actor: _Actor) -> str:
        """Waits for the node's first answer; returns the name of one that has the server's versions."""
        while actor.beat is None:
            if actor.lost.wait(CHECK_S):
                raise actor.loss()
        node, theirs, ours = f"node {actor.beat.node}", actor.beat.versions, NodeVersions.here()
        if theirs != ours:
            raise OtherNode(f"{node} has {theirs}, and the server {ours}; install the same versions on both")
        return node

    def _checked_model(self, node: str, source: str, loaded: NodeModel) -> ModelInfo:
        """Returns a model that a node has loaded from the files that the server has."""
        from tinkex.engine.model.catalog import resolve

        directory = resolve(source, self._config.models_home, self._callbacks.progress)
        ours = model_digests(directory)
        different = sorted(
            name for name in {*ours, *loaded.digests} if ours.get(name) != loaded.digests.get(name)
        )
        if different:
            raise OtherNode(
                f"{node} has other files of the model {source} than the server: {', '.join(different)}; copy the directory "
                "to the node, or download the same revision on both"
            )
        return replace(loaded.info, directory=directory)

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
