"""Benchmarks the engine against transformers and PEFT with the same weights, in one run.

    python benchmarks/bench_engine.py [--rounds N] [--threads N] [--json FILE] [--only CASE ...] [--no-growth]

Every case runs in its own process and alternates between the two sides; the table shows the best round of each,
their ratio, and whether it meets the target. With ``--threads 1`` times are CPU seconds. ``--only growth`` measures only how time and memory scale with batch,
length, adapters and sequences; ``--no-growth`` skips that. ``--arrivals N`` sets the number of prompts that arrive at
random times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROUNDS = 3
ARRIVALS = 64
CASE_NAMES = (
    "training", "uneven", "sharing", "adam", "decode", "end_to_end", "arrivals", "shared_prompt", "tenants", "adapters",
    "served", "memory",
)  # fmt: skip
GROWTH = "growth"


@dataclass(frozen=True)
class Row:
    title: str
    case: str
    unit: str
    against: str
    kind: Literal["speed", "time", "cost"]
    """The ratio of speeds and times is our advantage; the ratio of costs is ours over theirs."""
    aim: float
    ours: str = "ours"
    theirs: str = "theirs"


PEFT, HF, SELF = "transformers + PEFT", "transformers", "ourselves"
ROWS = (
    Row("forward_backward, 8 × 128 tokens, rank 32", "training", "tokens/s", PEFT, "speed", 1.25),
    Row("the same, fraction of the matmul bound", "training", "tokens/s", "the bound", "speed", 0.8, theirs="bound, tokens/s"),
    Row("the same, uneven lengths, 40 % weighted", "uneven", "tokens/s", PEFT + ", padded", "speed", 2.5),
    *(
        Row(title, "sharing", "s", "without sharing", "time", aim, ours=f"ours, {name}", theirs=f"theirs, {name}")
        for title, name, aim in (
            ("forward_backward, 8 answers of 64 on one prompt of 256", "8 × 64 on 256", 3.2),
            ("the same, 16 answers of 64 on one prompt of 512", "16 × 64 on 512", 5.5),
            ("the same, 8 × 128 tokens that share nothing", "8 × 128", 0.98),
        )
    ),
    Row("Adam step, rank 32", "adam", "ms", "torch.optim.AdamW", "time", 5),
    *(
        Row(f"decode, batch of {n}", "decode", "tokens/s", HF, "speed", aim, ours=f"ours at {n}", theirs=f"theirs at {n}")
        for n, aim in ((1, 2.5), (8, 2.1), (32, 1.7), (64, 1.7))
    ),
    Row("32 prompts of 64, 64 new tokens each", "end_to_end", "tokens/s", "generate, batch 32", "speed", 2),
    Row("prompts of 16…512 arriving at random, 16…128 new tokens", "arrivals", "tokens/s", "generate, batches of 8", "speed", 4),
    Row("16 samples of one prompt of 512, first tokens", "shared_prompt", "s", "16 prompts", "time", 5),
    Row("8 adapters in one training pass", "tenants", "s", "one adapter", "cost", 1.1),
    Row("8 adapters in one decode batch", "adapters", "s", "one adapter", "cost", 1.1),
    Row("training step through the server", "served", "s", "the bare engine", "cost", 1.05),
    Row("peak memory, training 8 × 512 tokens", "memory", "MB", PEFT, "cost", 0.5),
)  # fmt: skip


def measure(case: str, options: argparse.Namespace) -> dict[str, float]:
    if case == "memory":
        ours, theirs = (measure(f"memory_{side}", options) for side in ("ours", "theirs"))
        return {"ours": ours["peak, MB"], "theirs": theirs["peak, MB"]}
    size = options.arrivals if case == "arrivals" else options.rounds
    return _in_process(["--measure", case, str(size)], options.threads)


def _in_process(arguments: list[str], threads: int | None) -> dict[str, float]:
    environ = dict(os.environ)
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, __file__, *arguments]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environ)
    if out.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)} failed with exit code {out.returncode}")
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


def lines(row: Row, measurements: dict[str, float]) -> Iterator[tuple[str, bool]]:
    ours, theirs = measurements[row.ours], measurements[row.theirs]
    ratio = theirs / ours if row.kind == "time" else ours / theirs
    met = ratio <= row.aim if row.kind == "cost" else ratio >= row.aim
    aim = f"{'≤' if row.kind == 'cost' else '≥'} {row.aim:g} ×"
    verdict = "met" if met else "missed"
    yield (
        f"| {row.title} | {ours:,.4g} {row.unit} | {theirs:,.4g} {row.unit} ({row.against}) | {ratio:.2f} × | {aim} | {verdict} |",
        met,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, help="compute threads of both sides (default: all cores)")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument(
        "--arrivals", type=int, default=ARRIVALS, help="number of prompts that arrive at random times"
    )
    parser.add_argument("--only", nargs="*", choices=(*CASE_NAMES, GROWTH), help="run only these cases")
    parser.add_argument("--no-growth", action="store_true", help="skip the scaling measurements")
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "ROUNDS"), help=argparse.SUPPRESS)
    parser.add_argument("--grow", nargs=2, metavar=("AXIS", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure or options.grow:
        _run_child(options)
        return
    found: dict[str, dict[str, float]] = {}
    cases = [case for case in options.only or CASE_NAMES if case != GROWTH]
    if cases:
        _compare(cases, found, options)
    if GROWTH in options.only if options.only else not options.no_growth:
        _grow(found, options.threads)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


def _compare(cases: Sequence[str], found: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    print("| what | ours | against | ratio | aim | |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    notes: list[str] = []
    for case in cases:
        found[case] = measure(case, options)
        for row in (row for row in ROWS if row.case == case):
            for line, met in lines(row, found[case]):
                print(line, flush=True)
                if not met:
                    notes.append(f"not met: {row.title}, against {row.against}")
    for note in notes:
        print(note)


def _grow(found: dict[str, dict[str, float]], threads: int | None) -> None:
    from engine_cases import GROWTH

    for axis, (title, _, sizes) in GROWTH.items():
        print(f"\n| {title} | s | tokens/s | peak MB |\n| --- | --- | --- | --- |", flush=True)
        for size in sizes:
            measurements = _in_process(["--grow", axis, str(size)], threads)
            found[f"{axis} {size}"] = measurements
            print(
                f"| {size:,} | {measurements['s']:.3f} | {measurements['tokens/s']:,.1f} | {measurements['peak, MB']:,.0f} |",
                flush=True,
            )


def _run_child(options: argparse.Namespace) -> None:
    import torch
    from engine_cases import CASES, GROWTH

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if options.measure:
        case, rounds = options.measure
        print(json.dumps(CASES[case](int(rounds))))
    else:
        axis, size = options.grow
        print(json.dumps(GROWTH[axis][1](int(size))))


if __name__ == "__main__":
    main()
