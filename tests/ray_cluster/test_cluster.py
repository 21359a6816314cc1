"""A cluster of three nodes on loopback addresses: what is lost with a node is computed again, with the same numbers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.durability.execution import differences, execute
from tests.durability.killable import MODEL, KillableServer
from tests.durability.programs import make_program
from tests.durability.retrying_client import RetryingClient
from tests.ray_nodes import ENVIRONMENT, HEAD, Nodes, nodes, ray_python
from tinkex import ModelInput, SamplingParams, ServiceClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAINER, SAMPLERS = "127.0.0.3", "127.0.0.4"
LANES = ("--trainers", "1", "--samplers", "2", "--threads", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """The head has no place for lanes, one node has for a trainer, the other for two samplers."""
    with nodes(tmp_path_factory.mktemp("nodes"), {HEAD: 0, TRAINER: 1, SAMPLERS: 2}) as made:
        yield made


@pytest.fixture
def server(cluster: Nodes, tiny_model: Path, tmp_path: Path) -> Iterator[KillableServer]:
    options = ("--ray", cluster.address, *LANES, "--long-poll-s", "10")
    made = KillableServer(
        tmp_path, tiny_model, *options, often=4, deterministic=True, python=ray_python(), env=ENVIRONMENT
    )
    with made:
        yield made


def test_what_is_lost_with_nodes_actors_and_the_server_is_computed_again_with_the_same_numbers(
    cluster: Nodes, server: KillableServer
) -> None:
    programs = [make_program(seed) for seed in (501, 502)]

    async def run(progress: Any = None) -> list[Any]:
        clients = [
            RetryingClient(server.port, server.key, random.Random(seed), progress or (lambda: None))
            for seed in range(len(programs))
        ]
        try:
            return list(
                await asyncio.gather(*(execute(c, p) for c, p in zip(clients, programs, strict=True)))
            )
        finally:
            for client in clients:
                await client.close()

    losses = iter(
        [
            lambda: lose_node(cluster, SAMPLERS, num_cpus=2),
            lambda: kill_all(cluster.actors(TRAINER)),
            server.restart,
            lambda: lose_contact(cluster, server, TRAINER),
            lambda: lose_node(cluster, TRAINER, num_cpus=1),
        ]
    )

    async def disturbed() -> list[Any]:
        num_steps = sum(program.num_steps for program in programs)
        events, moved = 0, asyncio.Event()

        def progress() -> None:
            nonlocal events
            events += 1
            moved.set()

        working = asyncio.ensure_future(run(progress))
        for number, lose in enumerate(losses, 1):
            while events < number * num_steps // 6 and not working.done():
                moved.clear()
                waiting = asyncio.ensure_future(moved.wait())
                await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            await asyncio.to_thread(lose)
        return await working

    actual = asyncio.run(disturbed())
    expected = asyncio.run(run())
    for one, other in zip(actual, expected, strict=True):
        assert not differences(other, one, exact=True)


def lanes(server: KillableServer) -> dict[str, dict[str, Any]]:
    """The server's lanes, also while one of them is missing."""
    try:
        with urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=30) as response:
            health = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            health = json.load(error)
    found: dict[str, dict[str, Any]] = health["lanes"]
    return found


def lose_contact(cluster: Nodes, server: KillableServer, host: str) -> None:
    """Has a node not respond until the server notices."""

    def states() -> list[str]:
        return [lane["state"] for lane in lanes(server).values() if lane["node"] == host]

    server.wait()
    wait_until(lambda: bool(states()) and set(states()) == {"running"})
    with cluster.unreachable(host):
        wait_until(lambda: "running" not in states())


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits for a condition, well within the time limit of the test."""
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lose_node(cluster: Nodes, host: str, *, num_cpus: int) -> None:
    """Kills a node, and starts another one in its place."""
    cluster.kill(host)
    cluster.start(host, num_cpus=num_cpus)


def kill_all(processes: list[psutil.Process]) -> None:
    for each in processes:
        each.kill()


def test_lanes_are_placed_by_what_they_reserve_and_shown(cluster: Nodes, server: KillableServer) -> None:
    wait_until(lambda: [len(cluster.actors(host)) for host in (HEAD, TRAINER, SAMPLERS)] == [0, 1, 2])
    wait_until(lambda: all(lane["state"] == "running" for lane in lanes(server).values()))
    shown = lanes(server)
    assert sorted(shown) == ["sampler-0", "sampler-1", "trainer-0"]
    assert sorted(lane["node"] for lane in shown.values()) == [TRAINER, SAMPLERS, SAMPLERS]


def test_samplers_are_added_as_far_as_nodes_have_room_and_removed_when_they_are_idle(
    cluster: Nodes, tiny_model: Path, tmp_path: Path
) -> None:
    limits = ("--min-samplers", "1", "--max-samplers", "5", "--sampler-idle-s", "2", "--threads", "1")
    options = ("--ray", cluster.address, *limits, "--max-decode-batch", "1")
    server = KillableServer(tmp_path, tiny_model, *options, python=ray_python(), env=ENVIRONMENT)
    with server, ServiceClient(base_url=server.url, api_key=server.key) as service:
        sampling = service.create_sampling_client(base_model=MODEL)
        prompt, params = ModelInput.from_ints([1, 2, 3]), SamplingParams(max_tokens=100, seed=7, stop=[])
        alone = sampling.sample(prompt, 1, params).result().sequences[0]
        futures: list[Any] = []

        def is_full() -> bool:
            while sum(not future.done() for future in futures) < 50:
                futures.append(sampling.sample(prompt, 1, params))
            # Of five: the nodes have no room for more.
            return samplers(server)["running"] == 2 and "no sampler can be added" in server.log

        wait_until(is_full)
        found = {tuple(future.result().sequences[0].tokens) for future in futures}
        assert found == {tuple(alone.tokens)}
        wait_until(lambda: samplers(server) == {**samplers(server), "running": 1, "draining": 0})
        wait_until(lambda: len(cluster.actors(SAMPLERS)) + len(cluster.actors(TRAINER)) == 2)
        assert server.log.count("no sampler can be added") == 1
        server.stop()


def samplers(server: KillableServer) -> dict[str, int]:
    with urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=30) as response:
        found: dict[str, int] = json.load(response)["samplers"]
    return found


def test_a_program_without_the_token_cannot_use_the_cluster(cluster: Nodes) -> None:
    program = f"import ray; ray.init(address={cluster.address!r}, _node_ip_address={HEAD!r})"
    done = subprocess.run(
        [ray_python(), "-c", program],
        env={**os.environ, **ENVIRONMENT, "RAY_AUTH_TOKEN": "0" * 64},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode != 0
    assert "AuthenticationError" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ray", "127.0.0.1:1"), "there is no Ray cluster at 127.0.0.1:1"),
        (("--ray", "nowhere"), "must be HOST:PORT, auto or local"),
        (("--ray", "{address}", "--trainers", "9", "--threads", "1"), "they reserve CPU=9 of 3. Add nodes"),
        (("--ray", "{address}", "--trainer-resources", "CPU=1,tpu=1"), "tpu=1 of 0"),
        (("--ray", "{address}", "--trainers", "1", "--threads", "3"), "the nodes have CPU=0; CPU=1; CPU=2"),
        (("--ray", "local", "--trainer-resources", "lots"), "the resources 'lots' cannot be read at 'lots'"),
    ],
)
def test_a_cluster_that_cannot_hold_the_lanes_is_rejected_at_the_start(
    cluster: Nodes, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    given = [option.format(address=cluster.address) for option in options]
    done = serve_once(ray_python(), tmp_path, *given)
    assert done.returncode == 1
    assert message in done.stderr


def test_without_ray_the_command_to_install_it_is_named(tmp_path: Path) -> None:
    done = serve_once(sys.executable, tmp_path, "--ray")
    assert done.returncode == 1
    assert "pip install 'tinkex[ray]'" in done.stderr


def serve_once(python: str, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "tinkex", "serve", "--port", "0", *options],
        env={**os.environ, **ENVIRONMENT, "TINKEX_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
