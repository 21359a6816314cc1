"""A short mixed load, as `benchmarks/bench_server.py --soak` runs a long one: memory does not go on growing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_server.py"


def test_memory_stays_where_it_is_under_a_mixed_load(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--soak", "20", "--json", str(found)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    soak = json.loads(found.read_text())["soak"]
    assert min(soak[name] for name in ("trained", "sampled", "saved", "refused", "dropped")) > 0
    assert len(soak["memory"]) > 8
    assert soak["growth"] < 1.15
