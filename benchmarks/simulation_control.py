"""What the one API process takes for an operation and for a decode job, and how fast its journal is flushed: measured."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from simulation_cluster import ControlPlane
from simulation_costs import machine_name

CACHE = Path(__file__).with_name("data") / "control_plane.json"
CLIENTS = 64
GROUPS = (1, 16, 64)


@dataclass(frozen=True)
class Measured:
    """The server's figures; an operation is sent, recorded, flushed, run, committed and fetched."""

    date: str
    operations_per_s: float
    operation_cpu_s: float
    """CPU time of the API process; one of them has at most one core for Python code."""
    reports_per_s: float
    report_cpu_s: float
    flushes_per_s: dict[str, float]
    """By how many transactions wait for a flush together: transactions that are on disk in a second."""


def measured_control_plane(*, again: bool = False) -> ControlPlane:
    """The control plane of this machine, or of one that is recorded; with ``again`` it is measured now."""
    known = recorded_measurements()
    name = machine_name()
    if again or not known:
        known[name] = measure()
        text = json.dumps({machine: asdict(each) for machine, each in known.items()}, indent=1)
        CACHE.write_text(text + "\n")
    name = name if name in known else next(iter(known))
    return ControlPlane("measured", known[name].operation_cpu_s, known[name].report_cpu_s)


def recorded_measurements() -> dict[str, Measured]:
    """The figures of every machine that was measured."""
    found = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    return {machine: Measured(**each) for machine, each in found.items()}


def measure(seconds: float = 5.0) -> Measured:
    """Measure a real server without computation, the loop's reports, and the journal."""
    from bench_server import operations
    from server_side import served

    with served(idle=True) as server:
        found = asyncio.run(operations(server, CLIENTS, seconds))
    reports_per_s, report_cpu_s = measure_reports(seconds)
    return Measured(
        date=time.strftime("%Y-%m-%d"),
        operations_per_s=found["operations/s"],
        operation_cpu_s=found["CPU, ms/operation"] / 1000,
        reports_per_s=reports_per_s,
        report_cpu_s=report_cpu_s,
        flushes_per_s={str(group): measure_flushes(group, seconds / 2) for group in GROUPS},
    )


def measure_reports(seconds: float) -> tuple[float, float]:
    """How many decode jobs a second the loop plans and completes, and the CPU time of each, with a lane that computes nothing."""
    import server_side  # noqa: F401 -- makes the tests' model importable

    from tests.models import tiny_llama
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.engine import Engine
    from tinkex.engine.lanes.in_process import LocalBackend
    from tinkex.engine.lanes.interface import BatchStats, DecodeReport, DecodeStep
    from tinkex.engine.store import SessionRow
    from tinkex.errors import InvalidInput
    from tinkex.types import CreateSamplingSessionRequest, ModelInput, SampleRequest, SamplingParams

    steps = 0
    members: list[str] = []
    enough = threading.Event()

    class EndlessBackend(LocalBackend):
        def sample(self, source: str, step: DecodeStep) -> DecodeReport:  # noqa: ARG002
            nonlocal steps
            steps += 1
            members.extend(each.request_id for each in step.add)
            if not enough.is_set():
                return DecodeReport([], [], BatchStats(1))
            ended = [(each, InvalidInput("measured")) for each in members]
            members.clear()
            return DecodeReport(ended, [], BatchStats(0))

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        config = EngineConfig(home=home, models={"tiny": str(tiny_llama(home / "tiny"))}, max_decode_batch=1)
        engine = Engine(config, backends=[EndlessBackend(config)])
        engine.start()
        try:
            engine.load_models().result()
            engine.store.sessions.add(SessionRow("session", "ada", time.time(), time.time()))
            session = CreateSamplingSessionRequest(
                session_id="session", sampling_session_seq_id=0, base_model="tiny"
            )
            sampler = engine.admission.create_sampler("ada", session)
            # One that waits for a place: then every step is a job of its own.
            for number in range(2):
                request = SampleRequest(
                    prompt=ModelInput.from_ints([1, 2]),
                    sampling_params=SamplingParams(max_tokens=4),
                    sampling_session_id=sampler,
                    seq_id=number,
                )
                engine.submit("ada", request)
            time.sleep(0.5)
            first, start, cpu = steps, time.perf_counter(), time.process_time()
            time.sleep(seconds)
            number, used = steps - first, time.process_time() - cpu
            elapsed = time.perf_counter() - start
        finally:
            enough.set()
            engine.close()
    return number / elapsed, used / number


def measure_flushes(group: int, seconds: float) -> float:
    """Transactions a second that are on disk, while so many wait for a flush at any time."""
    from tinkex.engine.store.database import Database

    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        database = Database(Path(folder) / "journal.sqlite")
        try:
            with database.transaction() as execute:
                execute("CREATE TABLE entries (number INTEGER PRIMARY KEY, body BLOB)")
            body, number = b"x" * 1000, 0
            start = time.perf_counter()
            while time.perf_counter() < start + seconds:
                waiting: list[Future[None]] = []
                for _ in range(group):
                    with database.transaction() as execute:
                        execute("INSERT INTO entries (body) VALUES (?)", (body,))
                    waiting.append(database.flushed())
                for each in waiting:
                    each.result()
                number += group
            return number / (time.perf_counter() - start)
        finally:
            database.close()
