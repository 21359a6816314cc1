"""A mixed load, as `benchmarks/bench_server.py --soak` runs for hours: memory does not grow, and nothing fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_server.py"
SECONDS = float(os.environ.get("TINKEX_SOAK_SECONDS", "300"))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
def test_memory_does_not_grow_under_a_mixed_load(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--soak", str(SECONDS), "--json", str(found)],
        capture_output=True,
        text=True,
        timeout=SECONDS + 500,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # it stops at the first failed call
    soak = json.loads(found.read_text())["soak"]
    assert min(soak[name] for name in ("trained", "sampled", "saved", "refused", "dropped")) > 0
    assert len(soak["memory"]) >= 9
    assert soak["growth"] < 1.25, done.stdout
