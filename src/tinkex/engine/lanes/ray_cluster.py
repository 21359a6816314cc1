"""The connection of an engine to a Ray cluster, and the actors of its lanes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pickle
import signal
import socket
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tinkex.engine.lanes.interface import NoFreeNode
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from tinkex.engine.lanes.roles import LaneSpec

LOOPBACK = "127.0.0.1"
"""The only address that Ray does not extend to all interfaces when it listens."""
CONNECT_TIMEOUT_S = 5.0
PLACE_TIMEOUT_S = 30.0
"""How long the actor of an elastic lane may take to start on a node that had room for it."""
GROUPS = ("compute", "write", "check", "import", "beat")
"""The concurrency groups of an actor: calls of one group are made one after the other, those of several at the same time."""

Reserved: TypeAlias = Mapping[str, float]
"""What a lane reserves on its node, by the name of the resource."""


class RayCluster:
    """Starts actors on a cluster. One of a process; made before the first lane starts, closed after the last.

    ``needed`` is what the lanes reserve that there are always, ``elastic`` what those reserve that come and go.

    Example:
        >>> cluster = RayCluster("local", needed=[{"CPU": 1.0}])
        >>> handle = cluster.start_actor({"CPU": 1.0}, {"config": {}, "log_level": "WARNING"})
        >>> cluster.close()
    """

    def __init__(self, address: str, needed: Sequence[Reserved], elastic: Sequence[Reserved] = ()) -> None:
        if address == "local" and "ray" not in sys.modules:
            # Other users of this machine can connect to its ports. Ray reads this when it is imported.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        try:
            import ray  # pyright: ignore[reportMissingImports]
            import ray.exceptions  # pyright: ignore[reportMissingImports]  # a folder named ray is not enough
        except ModuleNotFoundError as error:
            raise SetupError(
                "a Ray cluster needs Ray, which is not installed; run: pip install 'tinkex[ray]'"
            ) from error
        self._ray = ray
        self._needed = needed
        self._elastic = elastic
        self._placing = threading.Lock()
        """Held while an elastic lane gets its place, so that two do not count on the same one."""
        self._joined = not ray.is_initialized()
        if self._joined:
            self._connect(address)
        try:
            self._check_resources()
        except SetupError:
            self.close()
            raise

    def start_actor(self, wanted: Reserved, settings: Mapping[str, Any], *, if_free: bool = False) -> Any:
        """Starts an actor on some node with what it reserves; returns its handle immediately.

        With ``if_free`` it waits until the actor runs, and raises :class:`NoFreeNode` if no node has room for it at the moment.
        """
        if not if_free:
            return self._start(wanted, settings)
        with self._placing:
            self._check_free(wanted)
            handle = self._start(wanted, settings)
            placed, _ = self._ray.wait([handle.__ray_ready__.remote()], timeout=PLACE_TIMEOUT_S)
            if not placed:
                self.end_actor(handle)
                raise NoFreeNode(f"no node had room for it within {PLACE_TIMEOUT_S:g} s")
            return handle

    def _start(self, wanted: Reserved, settings: Mapping[str, Any]) -> Any:
        from tinkex.engine.lanes.ray_actor import LaneActor

        reserved = dict(wanted)
        options: dict[str, Any] = {
            "num_cpus": reserved.pop("CPU", 0),
            "num_gpus": reserved.pop("GPU", 0),
            "resources": reserved,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        if "memory" in reserved:
            options["memory"] = reserved.pop("memory")
        remote = self._ray.remote(concurrency_groups=dict.fromkeys(GROUPS, 1))(LaneActor)
        return remote.options(**options).remote(pickle.dumps(settings))

    def call(self, handle: Any, method: str, group: str, *args: Any) -> Any:
        """Starts a call of an actor; returns a reference to its result."""
        return getattr(handle, method).options(concurrency_group=group).remote(*args)

    def wait(self, reference: Any, timeout_s: float) -> Any:
        """Returns the result of a call, or None if it has none yet; raises :class:`ActorLost` if it never will."""
        try:
            ready, _ = self._ray.wait([reference], timeout=timeout_s)
            return self._ray.get(ready[0]) if ready else None
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:
            raise ActorLost(type(error).__name__) from error

    def end_actor(self, handle: Any) -> None:
        """Ends an actor, if it has not ended."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.kill(handle, no_restart=True)

    def close(self) -> None:
        """Leave the cluster; a local one ends."""
        if self._joined:
            self._joined = False
            self._ray.shutdown()

    def _connect(self, address: str) -> None:
        options: dict[str, Any] = {
            "namespace": f"tinkex-{uuid.uuid4().hex}",
            "log_to_driver": False,
            "configure_logging": False,
            "include_dashboard": False if address == "local" else None,
        }
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to anybody
            self._keep_loopback()
            wanted = _total([*self._needed, *self._elastic])
            options |= {
                "_node_ip_address": LOOPBACK,
                # The user's number of workers and threads decides, not the number of cores.
                "num_cpus": max(os.cpu_count() or 1, int(wanted.pop("CPU", 0) + 0.999)),
                "resources": {
                    name: amount for name, amount in wanted.items() if name not in {"GPU", "memory"}
                },
            }
        elif address != "auto":
            host = check_reachable(address)
            if ipaddress.ip_address(host).is_loopback:
                options["_node_ip_address"] = host
        try:
            with _signals_kept():
                self._ray.init(address=address, **{k: v for k, v in options.items() if v is not None})
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise SetupError(
                f"cannot join the Ray cluster {address!r}: {error}. Start Ray on this machine as a node of the cluster "
                "(ray start --address=HEAD:PORT), with the same versions of Python and Ray everywhere; or use --ray local."
            ) from error

    def _keep_loopback(self) -> None:
        """Has Ray accept 127.0.0.1 as the address of a node, as it does on macOS; it replaces it by the machine's elsewhere."""
        from ray._private import ray_constants  # pyright: ignore[reportMissingImports]

        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # for its processes
        ray_constants.ENABLE_RAY_CLUSTER = False

    def _check_resources(self) -> None:
        missing = _missing(_total(self._needed), self._ray.cluster_resources())
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if missing:
            reason = f"they reserve {', '.join(missing)}"
        elif not _have_room(nodes, self._needed):
            lanes = sorted({_amounts(lane) for lane in self._needed})
            there = "; ".join(
                sorted(_amounts({name: node.get(name, 0) for name in self._needed[0]}) for node in nodes)
            )
            reason = f"each is on one node, they reserve {' or '.join(lanes)}, and the nodes have {there}"
        else:
            return
        raise SetupError(
            f"the Ray cluster has too few resources for {len(self._needed)} lanes: {reason}. Add nodes, "
            "start fewer trainers or samplers, or reserve less with --threads, --trainer-resources and --sampler-resources."
        )

    def _check_free(self, wanted: Reserved) -> None:
        from ray._private.state import (  # pyright: ignore[reportMissingImports]
            available_resources_per_node,
        )

        nodes: Mapping[str, Mapping[str, float]] = available_resources_per_node()
        if all(_missing(wanted, free) for free in nodes.values()):
            raise NoFreeNode(f"none of {len(nodes)} nodes of the cluster has {_amounts(wanted)} free")


@dataclass(frozen=True)
class Place:
    """A lane's place on a cluster: what it reserves on some node. An elastic lane does not wait for a node with room."""

    cluster: RayCluster
    spec: LaneSpec
    reserved: Reserved

    def start_actor(self, settings: Mapping[str, Any]) -> Any:
        """Starts its actor; see :meth:`RayCluster.start_actor`."""
        return self.cluster.start_actor(self.reserved, settings, if_free=self.spec.is_elastic)


def _total(lanes: Iterable[Reserved]) -> dict[str, float]:
    """What several lanes reserve together."""
    total: dict[str, float] = defaultdict(float)
    for reserved in lanes:
        for name, amount in reserved.items():
            total[name] += amount
    return total


def _missing(wanted: Reserved, there: Reserved) -> Sequence[str]:
    """Of which resources there is less than wanted."""
    return [
        f"{name}={amount:g} of {there.get(name, 0):g}"
        for name, amount in wanted.items()
        if amount > there.get(name, 0)
    ]


def _amounts(reserved: Reserved) -> str:
    return ", ".join(f"{name}={amount:g}" for name, amount in reserved.items())


def _have_room(nodes: Sequence[Reserved], lanes: Sequence[Reserved]) -> bool:
    """Whether lanes fit on nodes, each on one: the largest first, where most or where least is left.

    >>> _have_room([{"CPU": 3}, {"CPU": 3}], [{"CPU": 2}] * 2), _have_room([{"CPU": 3}, {"CPU": 3}], [{"CPU": 2}] * 3)
    (True, False)
    """

    def left_after(node: Reserved, lane: Reserved) -> Reserved:
        return {**node, **{name: node.get(name, 0) - amount for name, amount in lane.items()}}

    def fit(pick: Callable[..., Reserved]) -> bool:
        left = list(nodes)
        for lane in sorted(lanes, key=lambda each: sorted(each.items()), reverse=True):
            possible = [node for node in left if not _missing(lane, node)]
            if not possible:
                return False
            chosen = pick(possible, key=lambda node: sum(node.get(name, 0) for name in lane))
            left.remove(chosen)
            left.append(left_after(chosen, lane))
        return True

    return fit(max) or fit(min)


class ActorLost(Exception):
    """An actor, its node or the cluster is gone, or cannot be reached."""


def check_reachable(address: str) -> str:
    """Returns the IP address of a cluster's head; raises :class:`SetupError` if nothing listens there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise SetupError(f"the address {address!r} of the Ray cluster must be HOST:PORT, auto or local.")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
            found: str = connection.getpeername()[0]
            return found
    except OSError as error:
        raise SetupError(
            f"there is no Ray cluster at {address}: {error.strerror or error}. Start it with ray start --head, or use --ray local."
        ) from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keeps the signal handlers of this process, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
