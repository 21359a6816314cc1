"""Simulates the scheduler on clusters of up to 1,000 lanes with up to 100,000 users, in virtual time.

    python benchmarks/simulate_cluster.py [--quick] [--json FILE] [--only PART ...] [--lanes N ...] [--trace FILE] [--measure]

What decides is the engine's own scheduler; lanes take the time that their jobs cost on a GPU, from published figures, or on this
machine, measured with --measure. The requests are those of the public Azure LLM inference traces, or of users who train:
SFT in bursts, and RL. docs/scale.md explains the parts and shows their results:

grid      SFT and RL users together, from 1 to 1,000 lanes and from 10 to 100,000 users, without a limit of the control plane
trace     the requests of a trace at several loads
control   both, with the one API process and its journal as they were measured
machine   the costs of this machine, for a few lanes
scheduler the CPU time of the scheduler for each operation of a trace

The whole takes about half an hour; --quick takes seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from simulation_control import measured_control_plane, recorded_measurements  # noqa: E402
from simulation_costs import H100, machine_name, recorded, this_machine  # noqa: E402
from simulation_results import Result, header, row  # noqa: E402
from simulation_scenarios import Scenario, run  # noqa: E402
from simulation_traces import EXCERPTS, Trace, load  # noqa: E402

PARTS = ("grid", "trace", "control", "machine", "scheduler")
GRID = {1: (10, 100), 10: (10, 100, 1_000), 100: (100, 1_000, 10_000), 1_000: (10_000, 100_000)}
GRID_S = {1: 600.0, 10: 900.0, 100: 400.0, 1_000: 80.0}
LOADS = (0.5, 0.8, 0.95, 1.1)
SCHEDULER_S = {1: 60.0, 10: 20.0, 100: 5.0, 1_000: 1.5}
TRACE_S = {1: 200.0, 10: 60.0, 100: 30.0, 1_000: 10.0}


def scenarios(part: str) -> Iterator[Scenario]:
    """The simulations of one part."""
    if part == "grid":
        for lanes, users in GRID.items():
            for number in users:
                yield Scenario("mixed", H100, lanes, number, GRID_S[lanes])
    elif part == "trace":
        for lanes, seconds in TRACE_S.items():
            for share in LOADS if lanes < 1_000 else LOADS[1:2]:
                yield Scenario("trace", H100, lanes, 100 * lanes, seconds, share)
    elif part == "control":
        control = measured_control_plane()
        for lanes in (10, 30, 100, 200, 300, 500):
            yield Scenario("mixed", H100, lanes, 20 * lanes, 120.0, control=control)
        for lanes in (10, 20, 40, 80):
            yield Scenario("trace", H100, lanes, 100 * lanes, 20.0, 0.8, control=control)
    elif part == "scheduler":
        for lanes, seconds in SCHEDULER_S.items():
            yield Scenario("trace", H100, lanes, 100 * lanes, seconds, 0.8)
    else:
        costs = this_machine()
        for lanes in (1, 2, 4, 10):
            for per_lane in (2, 10):
                yield Scenario("mixed", costs, lanes, per_lane * lanes, 6_000.0)


def quick() -> Iterator[Scenario]:
    """Small simulations of every kind, for CI."""
    control = measured_control_plane()
    yield Scenario("mixed", H100, 1, 10, 120.0)
    yield Scenario("mixed", H100, 4, 40, 120.0, control=control)
    yield Scenario("trace", H100, 4, 40, 20.0, 0.8)
    yield Scenario("trace", H100, 4, 40, 20.0, 0.8, control=control)
    for costs in recorded()[:1]:
        yield Scenario("mixed", costs, 2, 10, 600.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few small simulations")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lanes", nargs="+", type=int, help="only clusters of these sizes")
    parser.add_argument("--trace", type=Path, help="a trace as it is published; default: the excerpt")
    parser.add_argument("--measure", action="store_true", help="measure this machine and its server first")
    parser.add_argument(
        "--json", type=Path, help="write the results into this file; parts that it has of other runs stay"
    )
    options = parser.parse_args()
    if options.measure:
        print(f"measuring {machine_name()}", file=sys.stderr, flush=True)
        print(this_machine(again=True), file=sys.stderr)
        print(measured_control_plane(again=True), file=sys.stderr, flush=True)
    trace: Trace = load(options.trace) if options.trace else load(EXCERPTS["azure-conv"], "azure-conv")
    start = time.perf_counter()
    found: dict[str, list[Result]] = {}
    print(header())
    for part in ("quick",) if options.quick else options.only:
        results = found.setdefault(part, [])
        for scenario in quick() if options.quick else scenarios(part):
            if options.lanes and scenario.lanes not in options.lanes:
                continue
            results.append(run(scenario, trace, _progress))
            print(row(results[-1]), flush=True)
    seconds = time.perf_counter() - start
    print(f"{seconds:.0f} s", file=sys.stderr)
    if options.json:
        control = measured_control_plane()
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "measured_on": machine_name(),
            "trace": trace.name,
            "control_plane": asdict(control),
            "measured": {name: asdict(each) for name, each in recorded_measurements().items()},
            "costs": [asdict(each) for each in (H100, *recorded())],
            **{part: [asdict(each) for each in results] for part, results in found.items()},
        }
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        seconds_by_part = {**known.get("seconds", {}), "+".join(found): round(seconds)}
        merged = {**known, **document, "seconds": seconds_by_part}
        options.json.write_text(json.dumps(merged, indent=1) + "\n")


def _progress(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
