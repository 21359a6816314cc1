"""Benchmarks the client against the official one: CPU, speed and memory, in one run.

    python benchmarks/bench_client.py [--rounds N] [--json FILE] [--only CASE ...]

Both clients use loopback HTTP, or HTTPS in the cases named ``tls``, to a server process that responds immediately with canned
results, so that only the client is measured. Every measurement runs in its own process; the clients alternate, and the table shows medians and
their ratios. CPU is the time of all threads of the client's process.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from tests.unit.transport.tls import Certificates, certificates  # noqa: E402 - found by the line above

CLIENTS = ("tinkex", "tinker")
BURST, SEQUENTIAL, IN_FLIGHT = 2000, 200, 10_000
PROMPT_TOKENS, NUM_SAMPLED = 256, 64
DATUMS, DATUM_TOKENS, STEPS = 64, 2048, 6


# ---- the cases, each in its own process ----


def prompts(sdk: Any, count: int) -> list[Any]:
    tokens = [(7 * i) % 32_000 for i in range(PROMPT_TOKENS)]
    return [sdk.ModelInput.from_ints([i % 32_000, *tokens[1:]]) for i in range(count)]


def sampler(sdk: Any, url: str) -> tuple[Any, Any]:
    service = sdk.ServiceClient(base_url=url, api_key="tml-benchmark")
    client = service.create_sampling_client(base_model="bench/model")
    params = sdk.SamplingParams(max_tokens=NUM_SAMPLED)
    for future in [client.sample(prompt, 1, params) for prompt in prompts(sdk, 50)]:
        read(future.result())
    return service, client


def read(response: Any) -> None:
    """Reads the fields of a sample that every program reads."""
    sequence = response.sequences[0]
    assert len(sequence.tokens) == NUM_SAMPLED
    assert len(sequence.logprobs) == NUM_SAMPLED


@dataclass
class Stopwatch:
    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu


def burst(sdk: Any, url: str) -> dict[str, float]:
    _, client = sampler(sdk, url)
    params, watch = sdk.SamplingParams(max_tokens=NUM_SAMPLED), Stopwatch()
    inputs = prompts(sdk, BURST)
    with watch.running():
        for future in [client.sample(prompt, 1, params) for prompt in inputs]:
            read(future.result())
    return {"cpu per sample, ms": watch.cpu / BURST * 1e3, "samples/s": BURST / watch.wall}


def burst_tls(sdk: Any, url: str) -> dict[str, float]:
    """Measures the same burst over HTTPS, with the certificates checked."""
    return burst(sdk, url)


def burst_async(sdk: Any, url: str) -> dict[str, float]:
    _, client = sampler(sdk, url)
    params, watch = sdk.SamplingParams(max_tokens=NUM_SAMPLED), Stopwatch()
    inputs = prompts(sdk, BURST)

    async def sample_all() -> None:
        for response in await asyncio.gather(*(client.sample_async(prompt, 1, params) for prompt in inputs)):
            read(response)

    with watch.running():
        asyncio.run(sample_all())
    return {"cpu per sample, ms": watch.cpu / BURST * 1e3, "samples/s": BURST / watch.wall}


def sequential(sdk: Any, url: str) -> dict[str, float]:
    _, client = sampler(sdk, url)
    params = sdk.SamplingParams(max_tokens=NUM_SAMPLED)
    times = []
    for prompt in prompts(sdk, SEQUENTIAL):
        start = time.perf_counter()
        read(client.sample(prompt, 1, params).result())
        times.append(time.perf_counter() - start)
    return {"latency, ms": statistics.median(times) * 1e3}


def sequential_tls(sdk: Any, url: str) -> dict[str, float]:
    """Measures the same latency over HTTPS."""
    return sequential(sdk, url)


def training(sdk: Any, url: str) -> dict[str, float]:
    service = sdk.ServiceClient(base_url=url, api_key="tml-benchmark")
    client = service.create_lora_training_client("bench/model", rank=8)
    tokens = [(11 * i) % 32_000 for i in range(DATUM_TOKENS + 1)]
    times, cpu = [], 0.0
    for _ in range(STEPS):
        cpu_before, start = time.process_time(), time.perf_counter()
        data = [
            sdk.Datum(
                model_input=sdk.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * DATUM_TOKENS},
            )
            for _ in range(DATUMS)
        ]
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(sdk.AdamParams(learning_rate=1e-4))
        output = passed.result()
        assert len(output.loss_fn_outputs) == DATUMS
        stepped.result()
        times.append(time.perf_counter() - start)
        cpu = time.process_time() - cpu_before
    return {"step, ms": statistics.median(times[1:]) * 1e3, "cpu of a step, ms": cpu * 1e3}


def in_flight(sdk: Any, url: str) -> dict[str, float]:
    _, client = sampler(sdk, url)
    params = sdk.SamplingParams(max_tokens=NUM_SAMPLED)
    inputs = prompts(sdk, IN_FLIGHT)
    before, start = peak_memory(), time.perf_counter()
    futures = [client.sample(prompt, 1, params) for prompt in inputs]
    for future in futures:
        read(future.result())
    peak = peak_memory()
    return {
        "peak memory, MB": peak / 1e6,
        "KB per sample in flight": (peak - before) / IN_FLIGHT / 1e3,
        "seconds": time.perf_counter() - start,
    }


def held(sdk: Any, url: str) -> dict[str, float]:
    """Measures concurrent samples: each takes two seconds on the server, so all are in flight simultaneously."""
    return in_flight(sdk, url)


def peak_memory() -> float:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


CASES: dict[str, Callable[[Any, str], dict[str, float]]] = {
    "burst": burst,
    "burst_tls": burst_tls,
    "burst_async": burst_async,
    "sequential": sequential,
    "sequential_tls": sequential_tls,
    "training": training,
    "in_flight": in_flight,
    "held": held,
}
SERVER_OPTIONS = {"held": ["--hold", "2"]}
"""Server options per case."""


def measure(case: str, name: str, url: str) -> None:
    os.environ["TINKER_TELEMETRY"] = "0"
    measured = CASES[case](importlib.import_module(name), url)
    print(json.dumps(measured), flush=True)
    os._exit(0)  # skips the clients' exit handlers


# ---- the run ----


@dataclass(frozen=True)
class Row:
    title: str
    case: str
    metric: str
    higher_is_better: bool
    aim: float | None
    """Target ratio to the official client."""


ROWS = (
    Row(f"CPU per sample, burst of {BURST:,}", "burst", "cpu per sample, ms", higher_is_better=False, aim=8),
    Row(f"samples per second, burst of {BURST:,}", "burst", "samples/s", higher_is_better=True, aim=8),
    Row(f"CPU per sample over TLS, burst of {BURST:,}", "burst_tls", "cpu per sample, ms", higher_is_better=False, aim=12),
    Row(f"samples per second over TLS, burst of {BURST:,}", "burst_tls", "samples/s", higher_is_better=True, aim=None),
    Row("CPU per sample, the same with asyncio", "burst_async", "cpu per sample, ms", higher_is_better=False, aim=8),
    Row("samples per second, the same with asyncio", "burst_async", "samples/s", higher_is_better=True, aim=8),
    Row("latency of sequential samples", "sequential", "latency, ms", higher_is_better=False, aim=8),
    Row("latency of sequential samples over TLS", "sequential_tls", "latency, ms", higher_is_better=False, aim=None),
    Row(f"forward_backward + optim_step, {DATUMS} × {DATUM_TOKENS:,} tokens", "training", "step, ms", higher_is_better=False, aim=1.5),
    Row("CPU of that step", "training", "cpu of a step, ms", higher_is_better=False, aim=None),
    Row(f"peak memory, {IN_FLIGHT:,} samples in flight", "in_flight", "peak memory, MB", higher_is_better=False, aim=1 / 0.6),
    Row("memory per sample in flight, KB", "in_flight", "KB per sample in flight", higher_is_better=False, aim=None),
    Row(f"memory per sample, {IN_FLIGHT:,} at the server for 2 s, KB", "held", "KB per sample in flight", higher_is_better=False, aim=None),
    Row(f"time for {IN_FLIGHT:,} samples of 2 s, s", "held", "seconds", higher_is_better=False, aim=None),
)  # fmt: skip


@contextmanager
def server(*options: str, tls: Certificates | None = None) -> Iterator[str]:
    if tls is not None:
        options += ("--tls", str(tls.server), str(tls.key))
    command = [sys.executable, str(HERE / "canned_server.py"), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def run_case(case: str, client: str, url: str, tls: Certificates | None) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", case, client, url]
    environment = {**os.environ, "SSL_CERT_FILE": str(tls.authority)} if tls else None
    out = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if out.returncode != 0:
        raise SystemExit(f"{client} failed in {case}:\n{out.stderr[-2000:]}")
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


def run(cases: list[str], rounds: int, options: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    medians: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        files = certificates(Path(directory))
        for case in cases:
            medians[case] = run_rounds(case, rounds, options, files if case.endswith("_tls") else None)
    return medians


def run_rounds(
    case: str, rounds: int, options: list[str], tls: Certificates | None
) -> dict[str, dict[str, float]]:
    results: dict[str, list[dict[str, float]]] = {client: [] for client in CLIENTS}
    with server(*options, *SERVER_OPTIONS.get(case, []), tls=tls) as url:
        for number in range(rounds):
            for client in CLIENTS if number % 2 else reversed(CLIENTS):
                results[client].append(run_case(case, client, url, tls))
    return {
        client: {metric: statistics.median(one[metric] for one in found) for metric in found[0]}
        for client, found in results.items()
    }


def table(medians: dict[str, dict[str, dict[str, float]]]) -> Iterator[tuple[Row, float, float, float]]:
    for row in ROWS:
        if row.case in medians:
            ours, theirs = (medians[row.case][client][row.metric] for client in CLIENTS)
            yield row, ours, theirs, ours / theirs if row.higher_is_better else theirs / ours


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--only", nargs="*", choices=CASES, help="run only these cases")
    parser.add_argument("--retrieve-futures", action="store_true", help="enable batched polls on the server")
    parser.add_argument("--measure", nargs=3, metavar=("CASE", "CLIENT", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
    server_options = ["--retrieve-futures"] if options.retrieve_futures else []
    medians = run(options.only or list(CASES), options.rounds, server_options)
    print(
        f"| what (median of {options.rounds}) | tinkex | tinker | better by | aim |\n| --- | --- | --- | --- | --- |"
    )
    missed = []
    for row, ours, theirs, ratio in table(medians):
        aim = f"{row.aim:.1f}×" if row.aim else ""
        print(f"| {row.title} | {ours:,.2f} | {theirs:,.2f} | {ratio:.1f}× | {aim} |")
        if row.aim is not None and ratio < row.aim:
            missed.append(row.title)
    for title in missed:
        print(f"not met: {title}")
    if options.json:
        options.json.write_text(json.dumps({"server": server_options, "medians": medians}, indent=2))


if __name__ == "__main__":
    main()
