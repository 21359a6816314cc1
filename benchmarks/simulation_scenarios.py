"""The simulations of a sweep: who sends what to how many lanes."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from simulation_clients import Client, RlClient, RlShape, Sender, SftClient, SftShape, TraceClients
from simulation_cluster import Cluster, ControlPlane
from simulation_costs import Costs
from simulation_results import Result, summarise
from simulation_traces import Trace

from tinkex.engine.store import Store

SLICES = 10
"""How often progress is reported."""


@dataclass(frozen=True)
class Scenario:
    """One simulation.

    ``mixed`` has as many SFT users as RL users, on as many trainers as samplers; otherwise the requests of a trace arrive at
    ``load`` times what the samplers can take.
    """

    workload: str
    costs: Costs
    lanes: int
    users: int
    seconds: float
    load: float | None = None
    control: ControlPlane = field(default_factory=ControlPlane)
    sft: SftShape = field(default_factory=SftShape)
    rl: RlShape = field(default_factory=RlShape)
    sft_share: float = 0.5
    seed: int = 0

    def __str__(self) -> str:
        load = f", load {self.load:g}" if self.load is not None else ""
        return (
            f"{self.workload}, {self.lanes:,} lanes, {self.users:,} users{load}, control {self.control.name}"
        )


def build(scenario: Scenario, trace: Trace, store: Store) -> tuple[Cluster, Sequence[Client]]:
    """The cluster and its clients."""
    if scenario.workload == "mixed":
        trainers = max(scenario.lanes // 2, 1)
        samplers = scenario.lanes - trainers
    else:
        trainers, samplers = 1, scenario.lanes
    until = scenario.seconds
    cluster = Cluster(scenario.costs, trainers, samplers, store, (until / 4, until), scenario.control)
    rng = random.Random(scenario.seed)
    clients: list[Client] = []
    if scenario.workload == "mixed":
        num_sft = round(scenario.users * scenario.sft_share)
        lengths = _lengths(trace, rng)
        for number in range(scenario.users):
            if number < num_sft:
                clients.append(SftClient(Sender(cluster, f"sft-{number}"), scenario.sft, until, rng))
            else:
                sender = Sender(cluster, f"rl-{number}")
                clients.append(RlClient(sender, scenario.rl, lengths, until, rng))
    else:
        prompt, new = trace.mean_tokens
        assert scenario.load is not None, "a trace is replayed at some load"
        per_s = scenario.load * samplers / scenario.costs.sample_s(prompt, new)
        clients.append(TraceClients(cluster, trace, per_s, scenario.users, until, rng))
    # Trainers have users of both kinds.
    run_ids = [run_id for client in clients for run_id in client.run_ids]
    rng.shuffle(run_ids)
    cluster.create_runs(run_ids)
    return cluster, clients


def run(scenario: Scenario, trace: Trace, progress: Callable[[str], object] = str) -> Result:
    """Simulate, over a window that leaves out the first quarter."""
    with opened_store() as store:
        start = time.perf_counter()
        cluster, clients = build(scenario, trace, store)
        for client in clients:
            client.start()
        for number in range(1, SLICES + 1):
            cluster.clock.run(until=scenario.seconds * number / SLICES)
            progress(f"{scenario}: {10 * number} %, {cluster.num_ended:,} operations")
        return summarise(
            cluster,
            workload=scenario.workload if scenario.workload == "mixed" else trace.name,
            users=scenario.users,
            load=scenario.load,
            real_s=time.perf_counter() - start,
        )


@contextmanager
def opened_store() -> Iterator[Store]:
    """An empty store in a directory of its own, for the placement; runs that it does not have cost it a look."""
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "engine") as store:
        yield store


def _lengths(trace: Trace, rng: random.Random) -> Callable[[], int]:
    """Lengths of answers as in the trace."""
    known = [each.new_tokens for each in trace.requests]
    return lambda: rng.choice(known)
