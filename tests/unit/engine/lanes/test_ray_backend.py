"""A lane on another machine: the same numbers, files by value, and losses as with a worker process; here without Ray."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.models import tiny_llama
from tests.unit.engine.lanes.test_worker_process import ALIKE, operations, saved, wait_until
from tests.unit.engine.test_engine import Caller, config, forward_backward, optim_step, sample
from tinkex.engine.config import EngineConfig
from tinkex.engine.durability.replay import same_result
from tinkex.engine.engine import Engine
from tinkex.engine.lanes.file_values import read_files, write_files
from tinkex.engine.lanes.interface import NoFreeNode, WorkerLost
from tinkex.engine.lanes.messages import ERROR
from tinkex.engine.lanes.ray_actor import Beat, LaneActor, Message, NodeVersions
from tinkex.engine.lanes.ray_backend import RayBackend
from tinkex.engine.lanes.ray_cluster import GROUPS, ActorLost, Place
from tinkex.engine.lanes.remote import Callbacks
from tinkex.engine.lanes.roles import LaneSpec, Role
from tinkex.errors import InvalidInput, SetupError
from tinkex.types import SamplingParams, SaveWeightsForSamplerRequest

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


@dataclass(eq=False)
class Node:
    """An actor whose concurrency groups are threads of this process; what it has not answered when it is lost it never will."""

    actor: LaneActor
    groups: Mapping[str, ThreadPoolExecutor]
    lost: bool = False
    pending: list[Future[Any]] = field(default_factory=list)

    @property
    def worker(self) -> int:
        beat: Beat = pickle.loads(self.actor.beat())
        assert beat.worker.pid is not None
        return beat.worker.pid

    def lose(self) -> None:
        """Loses the node: its worker exits, and no call is answered any more."""
        self.lost = True
        for group in self.groups.values():
            group.shutdown(wait=False, cancel_futures=True)
        self.actor.close()


class Machines:
    """Stands for a cluster: its nodes are threads. ``versions`` are what they claim to have installed."""

    def __init__(self, versions: NodeVersions | None = None) -> None:
        self.nodes: list[Node] = []
        self.versions = versions
        self.is_full = False

    def start_actor(
        self, wanted: Mapping[str, float], settings: Mapping[str, Any], *, if_free: bool = False
    ) -> Node:
        if if_free and self.is_full:
            raise NoFreeNode("no node has room for it")
        actor = LaneActor(pickle.dumps(settings))
        self.nodes.append(Node(actor, {name: ThreadPoolExecutor(1, name) for name in GROUPS}))
        return self.nodes[-1]

    def call(self, handle: Node, method: str, group: str, *args: Any) -> tuple[Node, Future[Any]]:
        if handle.lost:
            return handle, Future()
        return handle, handle.groups[group].submit(getattr(handle.actor, method), *args)

    def wait(self, reference: tuple[Node, Future[Any]], timeout_s: float) -> Any:
        node, future = reference
        try:
            found = future.result(0 if node.lost else timeout_s)
        except NotReady:
            if node.lost:
                raise ActorLost("ActorDiedError") from None
            return None
        if isinstance(found, bytes) and self.versions is not None:
            content = pickle.loads(found)
            if isinstance(content, Beat):
                return pickle.dumps(replace(content, versions=self.versions))
        return found

    def end_actor(self, handle: Node) -> None:
        if not handle.lost:
            handle.lose()

    def close(self) -> None:
        for node in self.nodes:
            self.end_actor(node)


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines()
    yield made
    made.close()


def open_engine(home: Path, model: Path, machines: Machines, **settings: Any) -> tuple[Engine, RayBackend]:
    engine_config = config(home, model, worker="process", **{**ALIKE, **settings})
    backend = _backend(engine_config, machines)
    engine = Engine(engine_config, backends=[backend])
    engine.start()
    engine.load_models().result(PATIENCE_S)
    return engine, backend


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path, machines: Machines) -> Iterator[Engine]:
    opened, _ = open_engine(tmp_path / "remote", tiny_model, machines)
    yield opened
    opened.close()


@pytest.fixture
def here(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine that computes in this process."""
    opened = Engine(config(tmp_path / "here", tiny_model, **ALIKE))
    opened.start()
    yield opened
    opened.close()


def test_a_node_computes_the_same_bits_and_what_it_writes_is_on_the_engines_disk(
    engine: Engine, here: Engine, machines: Machines
) -> None:
    near, far = Caller(here, session="same"), Caller(engine, session="same")
    run = near.create()
    assert far.create() == run
    for number, operation in enumerate(operations(run)):
        if number == 4:
            os.kill(machines.nodes[0].worker, signal.SIGKILL)  # the worker alone: its actor starts another
        if number == 8:
            machines.nodes[-1].lose()  # the whole node: another one takes the lane over
        outcome = far.outcome(far.submit(operation))
        assert not outcome.error
        assert same_result(outcome, near.outcome(near.submit(operation)))
    assert saved(engine, run, "end") == saved(here, run, "end")
    assert len(machines.nodes) == 2
    assert engine.health.status == "ok"
    names = [path.name for path in (engine.store.root).rglob("*") if "unfinished" in path.name]
    assert not names


def test_a_sampler_gets_the_files_of_adapters_that_its_node_lacks(
    engine: Engine, here: Engine, machines: Machines
) -> None:
    tokens = []
    for each in (here, engine):
        ada = Caller(each, session="adapters")
        run = ada.create()
        for operation in (forward_backward(run, 1), optim_step(run, 2)):
            assert not ada.outcome(ada.submit(operation)).error
        saving = SaveWeightsForSamplerRequest(model_id=run, seq_id=3, path="sampled")
        assert not ada.outcome(ada.submit(saving)).error
        if each is engine:
            machines.nodes[-1].lose()  # the adapter is on the engine's disk alone
        sampler = ada.sampler(model_path=f"tinker://{run}/sampler_weights/sampled")
        wanted = sample(sampler, sampling_params=SamplingParams(max_tokens=8, temperature=0.0, stop=[]))
        outcome = ada.outcome(ada.submit(wanted))
        assert not outcome.error
        tokens.append(outcome.result)
    assert same_tokens(*tokens)


def same_tokens(one: bytes, other: bytes) -> bool:
    from tinkex._wire import proto as wire_proto

    first, second = (wire_proto.decode_sample_response(each, ["?"]) for each in (one, other))
    return list(first.sequences[0].tokens) == list(second.sequences[0].tokens)


def test_a_node_leaves_no_process_and_no_file(tiny_model: Path, tmp_path: Path, machines: Machines) -> None:
    opened, backend = open_engine(tmp_path, tiny_model, machines)
    worker = machines.nodes[0].worker
    status = backend.status
    wait_until(lambda: backend.status.node is not None)
    assert status.state in {"running", "starting"}
    opened.close()
    wait_until(lambda: not psutil.pid_exists(worker))
    with pytest.raises(WorkerLost, match="it was closed"):
        backend.check()


def test_a_node_with_other_files_of_a_model_is_rejected_with_their_names(
    tmp_path: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    tiny_llama(_made(ours / "models" / "lab--tiny"), seed=1)
    tiny_llama(_made(theirs / "models" / "lab--tiny"), seed=2)
    monkeypatch.setenv("TINKEX_HOME", str(theirs))  # of the node, which has not the server's directories

    class OtherLayout(Machines):
        def start_actor(
            self, wanted: Mapping[str, float], settings: Mapping[str, Any], *, if_free: bool = False
        ) -> Node:
            home = {"home": tmp_path / "not on the node"}
            return super().start_actor(wanted, {**settings, "config": {**settings["config"], **home}})

    other = OtherLayout()
    backend = _backend(EngineConfig(home=ours, data_dir=tmp_path / "data", threads=1), other)
    try:
        backend.start()
        with pytest.raises(
            SetupError, match=r"has other files of the model lab/tiny .*: model\.safetensors;"
        ):
            backend.load("lab/tiny")
    finally:
        backend.close()
        other.close()


def test_a_node_with_another_version_is_rejected(tiny_model: Path, tmp_path: Path) -> None:
    old = Machines(replace(NodeVersions.here(), torch="1.0"))
    backend = _backend(EngineConfig(home=tmp_path, data_dir=tmp_path / "data", threads=1), old)
    try:
        backend.start()
        with pytest.raises(SetupError, match=r"torch='1\.0'.*install the same versions"):
            backend.load(str(tiny_model))
    finally:
        backend.close()
        old.close()


def test_a_lane_is_lost_again_on_a_node_with_another_version_and_its_operations_wait(
    tiny_model: Path, tmp_path: Path, machines: Machines
) -> None:
    backend = _backend(EngineConfig(home=tmp_path, data_dir=tmp_path / "data", threads=1), machines)
    backend.start()
    backend.load(str(tiny_model))
    machines.nodes[0].lose()
    with pytest.raises(WorkerLost):
        backend.create("run", str(tiny_model), _lora())
    machines.versions = replace(NodeVersions.here(), torch="1.0")
    backend.start()
    with pytest.raises(WorkerLost, match="install the same versions"):
        backend.load(str(tiny_model))
    machines.versions = None
    backend.start()
    backend.load(str(tiny_model))
    assert len(machines.nodes) == 3
    backend.close()


def test_a_call_to_a_lost_node_says_so(tiny_model: Path, tmp_path: Path, machines: Machines) -> None:
    backend = _backend(EngineConfig(home=tmp_path, data_dir=tmp_path / "data", threads=1), machines)
    backend.start()
    backend.load(str(tiny_model))
    machines.nodes[0].lose()
    with pytest.raises(WorkerLost, match="its actor or the node was lost"):
        backend.create("run", str(tiny_model), _lora())
    with pytest.raises(WorkerLost):
        backend.check()
    assert backend.status.state == "restarting"
    backend.start()
    backend.load(str(tiny_model))
    assert backend.status.restarts == 1
    backend.close()


def test_a_call_for_a_worker_that_was_lost_does_not_reach_its_successor(
    tiny_model: Path, tmp_path: Path, machines: Machines
) -> None:
    backend = _backend(EngineConfig(home=tmp_path, data_dir=tmp_path / "data", threads=1), machines)
    backend.start()
    backend.load(str(tiny_model))
    late = pickle.dumps(Message(1, "create", ("run", str(tiny_model), _lora()), {}))
    os.kill(machines.nodes[0].worker, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        backend.create("run", str(tiny_model), _lora())
    backend.start()
    backend.load(str(tiny_model))
    kind, content = pickle.loads(machines.nodes[0].actor.call(late))
    assert kind == ERROR
    assert isinstance(content, WorkerLost)
    assert not content.own_fault
    backend.create("run", str(tiny_model), _lora())
    assert backend.status.state != "restarting"
    backend.close()


def test_only_a_lane_that_may_be_missing_is_refused_for_lack_of_room(
    tmp_path: Path, machines: Machines
) -> None:
    machines.is_full = True
    settings = EngineConfig(home=tmp_path, data_dir=tmp_path / "data", threads=1)
    with pytest.raises(NoFreeNode, match="no node has room"):
        _backend(settings, machines, is_elastic=True).start()
    waiting = _backend(settings, machines)
    waiting.start()
    waiting.close()


def test_files_stay_in_their_directory(tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "deep/weights": b"\0\1"}
    write_files(tmp_path / "made", files)
    assert read_files(tmp_path / "made") == files
    with pytest.raises(InvalidInput, match="leads out of its directory"):
        write_files(tmp_path / "made", {"../outside": b""})
    assert not (tmp_path / "outside").exists()


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def _lora() -> Any:
    from tinkex.types import LoraConfig

    return LoraConfig(rank=2)


def _backend(engine_config: EngineConfig, machines: Machines, *, is_elastic: bool = False) -> RayBackend:
    spec = LaneSpec("lane-0", Role.BOTH, is_elastic=is_elastic)
    place = Place(machines, spec, {"CPU": 1.0})  # type: ignore[arg-type]  # the same methods
    return RayBackend(place, engine_config, Callbacks(None, lambda: None, lambda _: None))
