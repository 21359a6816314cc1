"""Nodes of Ray on loopback addresses of this machine, and servers whose workers run on them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from tests.other_clients.environments import python_of
from tests.processes import wait_ended

ROOT = Path(__file__).parents[1]
HEAD = "127.0.0.2"
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "4",
}
"""Of every node, and of servers that join them. A node whose processes are gone is missed soon, one that is slow is not."""
RANDOM_PORTS = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
ADDRESS = re.compile(rf"{re.escape(HEAD)}:\d+(?=')")
JOINED = re.compile(r"Ray runtime started")


@cache
def ray_python() -> str:
    """A Python with Ray, whose other packages and sources are those of the tests."""
    python = python_of("ray")
    site = next((python.parents[1] / "lib").glob("python*/site-packages"))
    ours = [sysconfig.get_path("purelib"), str(ROOT / "src"), str(ROOT)]
    (site / "tests.pth").write_text("\n".join(ours) + "\n")
    return str(python)


@dataclass
class Nodes:
    """A cluster of nodes, each a tree of processes; end one with :meth:`kill`."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)
    address: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, host: str, *, num_cpus: int = 1) -> None:
        """Starts a node at a loopback address: the head, if it is the first, or one that joins it."""
        place = ["--head", "--port=0", "--include-dashboard=false"]
        if self.address:
            place = [f"--address={self.address}"]
        command = [ray_python(), "-m", "ray.scripts.scripts", "start", *place, f"--node-ip-address={host}"]
        command += [
            f"--num-cpus={num_cpus}",
            "--disable-usage-stats",
            "--block",
            *RANDOM_PORTS,
            "--object-store-memory=100000000",
        ]
        log = self.folder / f"{host}.log"
        with log.open("wb") as output:
            self.processes[host] = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **self.environment}
            )
        deadline = time.monotonic() + 120
        while not JOINED.search(log.read_text()):
            assert self.processes[host].poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        if not self.address:
            found = ADDRESS.search(log.read_text())
            assert found is not None, log.read_text()
            self.address = found[0]

    def kill(self, host: str) -> None:
        """Sends SIGKILL to all processes of a node."""
        tree = self._tree(host)
        process = self.processes.pop(host)
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        wait_ended(tree, timeout_s=30)

    @contextlib.contextmanager
    def unreachable(self, host: str) -> Iterator[None]:
        """Within the block nothing on a node responds, as if the network to it were down."""
        tree = self._tree(host)
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
        try:
            yield
        finally:
            for each in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.resume()

    def _tree(self, host: str) -> list[psutil.Process]:
        """All processes of a node."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it did not start
            node = psutil.Process(self.processes[host].pid)
            return [node, *node.children(recursive=True)]
        return []

    def actors(self, host: str) -> list[psutil.Process]:
        """The actors of lanes on a node."""
        return ray_actors(self.processes[host].pid)


def ray_actors(pid: int) -> list[psutil.Process]:
    """The actors of lanes among the descendants of a process."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "LaneActor" in " ".join(child.cmdline()):
                    found.append(child)
    return found


@contextlib.contextmanager
def nodes(
    folder: Path, cpus: Mapping[str, int], environment: Mapping[str, str] = ENVIRONMENT
) -> Iterator[Nodes]:
    """A cluster with these nodes; the first is the head."""
    cluster = Nodes(folder, environment)
    try:
        for host, num_cpus in cpus.items():
            cluster.start(host, num_cpus=num_cpus)
        yield cluster
    finally:
        for host in reversed(list(cluster.processes)):
            cluster.kill(host)
