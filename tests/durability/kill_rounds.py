"""Random programs on a real server that is killed repeatedly: ``python -m tests.durability.kill_rounds --rounds 300``.

Every round is one SIGKILL, to the process that answers, to the one that computes, or to both, at a random moment: while
operations come in, while they run, while results are fetched, while the server starts. Programs continue until they are
done; then they are carried out once more undisturbed, and everything is compared: every result, the weights and moments
that were downloaded, what was sampled, which checkpoints there are, and what the database says was done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.durability.execution import Execution, differences, execute
from tests.durability.killable import KillableServer
from tests.durability.programs import Program, make_program
from tests.durability.retrying_client import PATIENCE_S, RetryingClient
from tests.models import tiny_llama
from tests.processes import wait_ended
from tests.ray_nodes import ENVIRONMENT, ray_actors, ray_python

ARMS = ("api", "worker", "both")
POOL_ARMS = (*ARMS, "one", "one")
"""For several workers: also only one of them."""
RAY_ARMS = (*POOL_ARMS, "actor", "actor")
"""On Ray: also one of the actors that monitor the workers."""
TRAINERS = ("--trainers", "2", "--threads", "1", "--data-parallel-tokens", "24")
POOL = (*TRAINERS, "--samplers", "2")
ELASTIC = (*TRAINERS, "--min-samplers", "0", "--max-samplers", "2", "--sampler-idle-s", "0.3")
"""Samplers are added for the first sample after a pause, and removed soon after the last."""
UNWANTED = ("Traceback", "other digits", "cannot be restored", "failed unexpectedly", "records contradict")
"""Messages that never appear in the log of a server that was only killed."""


@dataclass
class Tally:
    """Counts of the rounds so far."""

    kills: Counter[str] = field(default_factory=Counter)
    programs: int = 0
    operations: int = 0
    lost: int = 0
    repeated: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        arms = ", ".join(f"{self.kills[arm]} {arm}" for arm in sorted(self.kills))
        return (
            f"{self.kills.total()} kills ({arms}), {self.programs} programs with {self.operations} operations, "
            f"{self.lost} answers lost, {self.repeated} calls repeated, {len(self.failures)} differences"
        )


class Rounds:
    """Kills one server while programs run on it."""

    def __init__(self, server: KillableServer, rng: random.Random, tally: Tally, arms: Sequence[str]) -> None:
        self._server = server
        self._rng = rng
        self._tally = tally
        self._arms = arms
        self._events = 0
        self._orphans: list[psutil.Process] = []

    async def disturbed(self, programs: Sequence[Program], kills: int) -> list[Execution]:
        """Execute programs concurrently, with ``kills`` kills spread over them."""
        self._events = 0
        span = max(1, 2 * sum(program.num_steps for program in programs) // (kills + 1))
        working = asyncio.ensure_future(self._execute(programs))
        for _ in range(kills):
            await self._moment(span, working)
            if working.done():
                break
            self.kill(self._rng.choice(self._arms))
        return await working

    async def undisturbed(self, programs: Sequence[Program]) -> list[Execution]:
        """Execute programs without kills."""
        await asyncio.to_thread(self._server.wait)
        return await self._execute(programs)

    async def _execute(self, programs: Sequence[Program]) -> list[Execution]:
        clients = [
            RetryingClient(self._server.port, self._server.key, self._rng, self._moved) for _ in programs
        ]
        try:
            return list(
                await asyncio.gather(*(execute(c, p) for c, p in zip(clients, programs, strict=True)))
            )
        finally:
            self._tally.lost += sum(client.lost for client in clients)
            self._tally.repeated += sum(client.repeated for client in clients)
            for client in clients:
                await client.close()

    def _moved(self) -> None:
        self._events += 1

    async def _moment(self, span: int, working: asyncio.Future[list[Execution]]) -> None:
        """Wait for the time of the next kill: soon after progress, or at a random time."""
        if self._rng.random() < 0.25:
            await asyncio.wait([working], timeout=self._rng.uniform(0.0, 2.5))
            return
        target = self._events + self._rng.randint(1, span)
        deadline = time.monotonic() + 60
        while self._events < target and not working.done() and time.monotonic() < deadline:  # noqa: ASYNC110 -- a count
            await asyncio.sleep(0.002)
        await asyncio.wait([working], timeout=self._rng.uniform(0.0, 0.03))

    def kill(self, arm: str) -> None:
        """Kill what an arm names: the server, its workers, both, one worker, or an actor."""
        if self._server.process.poll() is not None:
            raise AssertionError(f"the server ended by itself\n{self._server.log}")
        workers = self._server.workers()
        if arm != "api" and not workers:
            arm = "api"
        if arm == "actor":
            actors = ray_actors(self._server.process.pid)
            if actors:
                self._orphans += workers
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._rng.choice(actors).kill()
            self._tally.kills[arm] += 1
            return
        if arm == "one":
            with contextlib.suppress(psutil.NoSuchProcess):
                self._rng.choice(workers).kill()
            self._tally.kills[arm] += 1
            return
        self._orphans += workers
        if arm != "api":
            self._server.kill_workers()
        if arm != "worker":
            self._server.restart()
        self._tally.kills[arm] += 1

    async def close(self) -> list[str]:
        """Kill it once more, start it, shut it down cleanly; returns the problems in its data."""
        self.kill("api")
        await asyncio.to_thread(self._server.wait)
        await asyncio.to_thread(self._server.stop)
        wrong = [line for line in self._server.log.splitlines() if any(word in line for word in UNWANTED)]
        alive = wait_ended(self._orphans, timeout_s=10)
        wrong += [f"process {orphan.pid} outlived its server" for orphan in alive]
        return wrong + inspect(self._server.home / "engine")


def inspect(data: Path) -> list[str]:
    """Returns the problems in the data of a stopped server: operations that ran twice or never, unreferenced files."""
    with contextlib.closing(sqlite3.connect(data / "engine.db")) as database:
        [[sound]] = database.execute("PRAGMA integrity_check").fetchall()
        found = [] if sound == "ok" else [f"the database is corrupt: {sound}"]
        for request_id, target in database.execute(
            "SELECT request_id, target FROM futures WHERE status = 'pending'"
        ):
            found.append(f"{request_id} of {target} was accepted and has no outcome")
        for request_id, times in database.execute(
            "SELECT request_id, count(*) FROM finished GROUP BY request_id HAVING count(*) > 1"
        ):
            found.append(f"{request_id} ended {times} times")
        known = {
            directory
            for table in ("checkpoints", "samplers")
            for [directory] in database.execute(f"SELECT directory FROM {table} WHERE directory IS NOT NULL")
        } | {file for [file] in database.execute("SELECT file FROM savepoints")}
    lying = {
        str(path.relative_to(data))
        for kind, depth in (("checkpoints", "*/*/*"), ("snapshots", "*"), ("savepoints", "*"))
        for path in (data / kind).glob(depth)
    }
    found += [f"{path} lies about" for path in sorted(lying - known)]
    found += [f"{path} is missing" for path in sorted(known - lying)]
    return found


def usage(data: Path, execution: Execution) -> dict[str, int]:
    """Returns the recorded usage of a session, as far as it is equal in every execution."""
    with contextlib.closing(sqlite3.connect(data / "engine.db")) as database:
        rows = database.execute(
            "SELECT kind, sum(amount) FROM usage WHERE session_id = ? AND kind IN ('training', 'checkpoint') "
            "GROUP BY kind",
            (execution.session_id,),
        )
        return dict(rows.fetchall())


def check_accepted(data: Path, execution: Execution) -> list[str]:
    """Returns the problems of a session's accepted operations: each seq_id of each run must have ended once."""
    found = []
    with contextlib.closing(sqlite3.connect(data / "engine.db")) as database:
        for run_id, numbers in execution.accepted.items():
            rows = database.execute(
                "SELECT seq_id FROM futures WHERE target = ? AND status != 'pending'", (run_id,)
            ).fetchall()
            if sorted(number for [number] in rows) != sorted(numbers):
                found.append(f"{run_id} ended {sorted(rows)} and accepted {sorted(numbers)}")
    return found


async def play(
    home: Path,
    model: Path,
    *,
    kills: int,
    seed: int,
    exact: bool,
    tally: Tally,
    arms: Sequence[str] = ARMS,
    concurrency: int = 2,
    kills_each: int = 8,
    say: bool = False,
    more: Sequence[str] = (),
    on_ray: bool = False,
) -> None:
    """Kill one server, started with ``more`` options and perhaps ``on_ray``, ``kills`` times, with ``concurrency`` programs at a time; problems are added to the tally."""
    rng = random.Random(seed)
    options = ("--max-live-runs", "10000", "--long-poll-s", "10", *more)
    where: dict[str, Any] = {}
    if on_ray:
        options, where = (*options, "--ray"), {"python": ray_python(), "env": ENVIRONMENT}
    server = KillableServer(home, model, *options, often=rng.choice((3, 6, 50)), deterministic=exact, **where)
    with server:
        rounds = Rounds(server, rng, tally, arms)
        until, next_seed = tally.kills.total() + kills - 1, seed * 1000
        while tally.kills.total() < until:
            programs = [make_program(next_seed + n) for n in range(concurrency)]
            next_seed += concurrency
            began = time.monotonic()
            actual = await rounds.disturbed(programs, min(kills_each, until - tally.kills.total()))
            took = time.monotonic() - began
            expected = await rounds.undisturbed(programs)
            tally.programs += concurrency
            tally.operations += sum(program.num_steps for program in programs)
            data, wrong = home / "engine", []
            for program, ours, theirs in zip(programs, actual, expected, strict=True):
                found = (
                    differences(theirs, ours, exact=exact)
                    + check_accepted(data, ours)
                    + check_accepted(data, theirs)
                )
                if usage(data, ours) != usage(data, theirs):
                    found.append(f"used {usage(data, ours)} instead of {usage(data, theirs)}")
                wrong += [f"program {program.seed} ({program.dialect}): {each}" for each in found]
            tally.failures += wrong
            if say:
                verdict = "the same" if exact else "the same but for rounding"
                kept = f"{took:5.1f} s; so far {tally}"
                print(f"{'DIFFERENT' if wrong else verdict}: {kept}", *wrong, sep="\n  ", flush=True)
        tally.failures += await rounds.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300, help="kills in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="what is killed")
    parser.add_argument(
        "--pool",
        action="store_true",
        help="two trainers and two samplers, of which also single ones are killed",
    )
    parser.add_argument(
        "--ray", action="store_true", help="the same on a Ray cluster, of which also actors are killed"
    )
    parser.add_argument(
        "--elastic", action="store_true", help="samplers that are added and removed all the time"
    )
    parser.add_argument("--each", type=int, default=30, help="kills of one server before the next one")
    parser.add_argument(
        "--keep", type=Path, help="a directory for data and logs of the servers, kept afterwards"
    )
    options = parser.parse_args()
    has_lanes = options.pool or options.ray or options.elastic
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        model = tiny_llama(place / "model")
        number = 0
        while (left := options.rounds - tally.kills.total()) > 0:
            home = place / f"server-{number}"
            home.mkdir()
            print(f"server {number} ({'exact' if number % 3 else 'packed'}), seed {options.seed + number}")
            asyncio.run(
                play(
                    home,
                    model,
                    kills=min(options.each, left),
                    seed=options.seed + number,
                    exact=bool(number % 3),
                    tally=tally,
                    arms=RAY_ARMS if options.ray else POOL_ARMS if has_lanes else options.arms,
                    say=True,
                    more=ELASTIC if options.elastic else POOL if has_lanes else (),
                    on_ray=options.ray,
                )
            )
            number += 1
    print(
        f"\n{tally}\nin {time.monotonic() - began:,.0f} s on {number} servers; a client waits {PATIENCE_S:g} s"
    )
    for failure in tally.failures:
        print(f"  {failure}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
