"""The simulation of `benchmarks/simulate_cluster.py` loses nothing, leaves no lane idle beside work, and shares equally."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # its modules import one another by name

from simulation_clients import RlShape, SftShape  # noqa: E402
from simulation_cluster import Cluster, ControlPlane, Job  # noqa: E402
from simulation_costs import H100, Costs  # noqa: E402
from simulation_results import fairness, summarise  # noqa: E402
from simulation_scenarios import Scenario, build  # noqa: E402
from simulation_traces import EXCERPTS, Request, Trace, load  # noqa: E402

from tinkex.engine.operation import Kind  # noqa: E402
from tinkex.engine.store import Store  # noqa: E402

SMALL = replace(H100, max_decode_batch=4, max_tokens_per_pass=4096)
TRACE = Trace("three", [Request(0.0, 100, 5), Request(0.4, 50, 40), Request(1.0, 10, 20)])
MIXED = Scenario(
    "mixed", SMALL, 3, 6, 12.0, sft=SftShape(pause_s=1.0), rl=RlShape(prompts=2, group_size=2, reward_s=0.2)
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("simulation") / "engine") as opened:
        yield opened


def simulated(scenario: Scenario, store: Store, trace: Trace = TRACE) -> Cluster:
    cluster, clients = build(scenario, trace, store)
    for client in clients:
        client.start()
    cluster.clock.run()  # what is in flight when the users stop ends too
    return cluster


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
def test_every_operation_that_was_sent_ends_once(store: Store, lanes: int) -> None:
    cluster = simulated(replace(MIXED, lanes=lanes), store)
    assert cluster.num_submitted == cluster.num_ended > 50
    assert cluster.table.unfinished() == []
    assert not cluster.work
    assert {each.kind for each in cluster.records} >= {Kind.SAMPLE, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP}
    assert all(each.submitted <= each.started <= each.ended for each in cluster.records)


def test_the_same_seed_gives_the_same_simulation(store: Store) -> None:
    one, two = (simulated(MIXED, store).records for _ in range(2))
    assert one == two
    assert simulated(replace(MIXED, seed=1), store).records != one


def test_no_trainer_is_idle_while_one_of_its_runs_is_ready(store: Store) -> None:
    cluster, clients = build(MIXED, TRACE, store)
    for client in clients:
        client.start()
    num_checked = 0
    for number in range(1, 200):
        cluster.clock.run(until=number * 0.05)
        for lane in cluster.lanes.values():
            if lane.job is None:
                num_checked += 1
                assert not cluster.table.has_training(among=cluster.own_runs(lane.name) or frozenset())
    assert num_checked


def test_a_saturated_trainer_is_shared_equally_and_always_busy(store: Store) -> None:
    scenario = replace(
        MIXED, lanes=1, users=5, seconds=400.0, sft_share=1.0, sft=SftShape(burst_steps=10**6, pause_s=1.0)
    )
    cluster = simulated(scenario, store)
    result = summarise(cluster, workload="sft", users=5, load=None, real_s=0.0)
    assert result.jain is not None
    assert result.jain > 0.99
    assert result.trainer_utilisation is not None
    assert result.trainer_utilisation > 0.99


def test_a_slow_control_plane_is_what_operations_wait_for(store: Store) -> None:
    scenario = replace(MIXED, workload="trace", lanes=2, users=4, seconds=8.0, load=0.5)
    found = []
    for control in (ControlPlane(), ControlPlane("slow", operation_s=0.05)):
        cluster, clients = build(replace(scenario, control=control), TRACE, store)
        for client in clients:
            client.start()
        cluster.clock.run(until=scenario.seconds)
        found.append(summarise(cluster, workload="t", users=4, load=0.5, real_s=0.0))
    free, slow = found
    assert free.sample_wait_p50 is not None
    assert slow.sample_wait_p50 is not None
    assert not free.is_saturated
    assert slow.is_saturated
    assert slow.sample_wait_p50 > free.sample_wait_p50 + 0.5


def test_a_job_that_is_cut_ends_with_the_step_that_runs() -> None:
    job = Job(1.0 + 4 * 0.5 + 2 * 0.25, (), 1.0, [(4, 0.5), (2, 0.25)])
    assert not job.cut(3.4)
    assert job.cut(2.1)
    assert (job.num_steps, job.seconds) == (3, 2.5)
    assert job.cut(0.2), "the prefill is not cut"
    assert (job.num_steps, job.seconds) == (1, 1.5)


def test_the_excerpts_are_replayed_at_any_rate_with_their_bursts() -> None:
    for path in EXCERPTS.values():
        trace = load(path)
        assert len(trace.requests) > 1_000
        arrivals = trace.arrivals(per_s=1000.0)
        times = [next(arrivals).seconds for _ in range(3 * len(trace.requests))]
        assert times == sorted(times)
        assert times[-1] == pytest.approx(len(times) / 1000.0, rel=0.01)
        assert path.stat().st_size < 100_000


def test_costs_solve_the_figures_they_were_derived_from() -> None:
    costs: Costs = H100
    for prompt, new, tokens_per_s in ((128, 2048, 22_714), (2048, 128, 3_450)):
        assert new / costs.sample_s(prompt, new) == pytest.approx(tokens_per_s, rel=0.02)


def test_the_fairness_of_users_is_compared_within_their_kind(store: Store) -> None:
    cluster = simulated(replace(MIXED, users=2, seconds=4.0), store)
    assert fairness(cluster) is None, "there is one user of each kind"


@pytest.mark.slow
def test_the_quick_sweep_prints_a_table_and_writes_its_results(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "simulate_cluster.py"), "--quick", "--json", str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(file.read_text())["quick"]
    assert len(results) >= 4
    assert done.stdout.count("\n") == len(results) + 2
    for each in results:
        assert each["operations"] > 0
        assert each["control_utilisation"] <= 1
    assert "100 %" in done.stderr
