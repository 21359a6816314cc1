"""Benchmarks whole training steps against TRL's trainers: the same model and tokens, in fp32 on the CPU, with LoRA of rank 32.

    pip install -c constraints.txt -e '.[engine,bench]'
    python benchmarks/bench_trl.py [--rounds N] [--steps N] [--threads N] [--only CASE ...] [--trl-python PATH]

Each side runs in a process of its own, in turns; the first step of a process is a warm-up. The table shows the medians. With
``--threads 1`` times are CPU seconds, which other load changes least; otherwise they are seconds. TRL needs up to 17 GB. It
may be installed in another environment: ``--trl-python`` names its interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    title: str
    case: str
    aim: float
    """How many times faster ours is to be."""


ROWS = (
    Row("GRPO step, 4 prompts of 128 × 8 answers of 32", "grpo", 7),
    Row("DPO step, 4 pairs, 128 + 64 tokens", "dpo", 3),
    Row("SFT epoch, 64 examples of 16…256 tokens, in batches of 8", "sft", 4),
    Row("the same, TRL with length-grouped batches", "sft_grouped", 4),
)
MAX_MEMORY_RATIO = 0.2


def measure(python: str, side: str, case: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one side of a case in a process of its own."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if options.threads is not None:
        environ["OMP_NUM_THREADS"] = str(options.threads)
    command = [python, str(HERE / f"trl_{side}.py"), case, str(model), str(options.steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=HERE)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{case}, {side}: {found}", file=sys.stderr, flush=True)
    return found


def compare(row: Row, model: Path, options: argparse.Namespace) -> list[str]:
    """Returns the lines of one case."""
    sides = {"ours": sys.executable, "theirs": options.trl_python}
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for number in range(options.rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            found[side].append(measure(sides[side], side, row.case, model, options))
    clock = "cpu" if options.threads == 1 else "wall"
    ours, theirs = (
        statistics.median(seconds for one in found[side] for seconds in one[clock])
        for side in ("ours", "theirs")
    )
    unit = "CPU s" if clock == "cpu" else "s"
    ratio = theirs / ours
    lines = [
        f"| {row.title} | {ours:.1f} {unit} | {theirs:.1f} {unit} | {ratio:.1f} × | ≥ {row.aim:g} × | {_verdict(ratio >= row.aim)} |"
    ]
    if row.case == "grpo":
        ours, theirs = (max(one["peak"] for one in found[side]) / 1e9 for side in ("ours", "theirs"))
        ratio = ours / theirs
        lines.append(
            f"| the same, peak memory | {ours:.1f} GB | {theirs:.1f} GB | {ratio:.2f} × | ≤ {MAX_MEMORY_RATIO:g} × | "
            f"{_verdict(ratio <= MAX_MEMORY_RATIO)} |"
        )
    return lines


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes per side and case")
    parser.add_argument("--steps", type=int, default=1, help="measured steps or epochs per process")
    parser.add_argument("--threads", type=int, help="compute threads of both sides (default: all cores)")
    parser.add_argument("--only", nargs="*", choices=[row.case for row in ROWS], help="run only these cases")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter that has TRL")
    options = parser.parse_args()
    has_trl = subprocess.run([options.trl_python, "-c", "import trl"], capture_output=True, check=False)
    if has_trl.returncode != 0:
        print(
            "TRL: not measured; run pip install -c constraints.txt -e '.[engine,bench]', or give --trl-python"
        )
        return
    from tinkex.engine.config import tinkex_home
    from tinkex.engine.model.catalog import DEFAULT_MODEL, resolve

    model = resolve(DEFAULT_MODEL, tinkex_home() / "models")
    print("| what | ours | TRL | ratio | aim | |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    for row in ROWS:
        if options.only is None or row.case in options.only:
            print("\n".join(compare(row, model, options)), flush=True)


if __name__ == "__main__":
    main()
