"""Benchmarks `import tinkex` against `import tinker` in new interpreters, in one run.

    python benchmarks/bench_import.py [--json FILE]

The official client imports torch if it is installed; the rows "without torch" hide it, to simulate a machine
without torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROUNDS = 9
AIM = 8
HEAVY = ("torch", "transformers", "pydantic", "httpx", "aiohttp", "pyqwest", "requests")
PROGRAM = """
import sys, time
if {hide_torch}:
    sys.modules["torch"] = None
before = set(sys.modules)
start = time.perf_counter()
{statement}
elapsed = time.perf_counter() - start
loaded = set(sys.modules) - before
print(elapsed, len(loaded), ",".join(name for name in {heavy!r} if name in loaded) or "none")
"""


@dataclass(frozen=True)
class Case:
    """One statement to time."""

    title: str
    statement: str
    hide_torch: bool = False


@dataclass(frozen=True)
class Timing:
    """The cost of a statement."""

    title: str
    seconds: float
    modules: int
    heavy: str


CASES = (
    Case("import tinkex", "import tinkex"),
    Case("import tinker, without torch", "import tinker", hide_torch=True),
    Case("import tinker", "import tinker"),
    Case("tinkex.ServiceClient()", "import tinkex; tinkex.ServiceClient(base_url='http://127.0.0.1:9', api_key='tml-x')"),
    Case("tinker.ServiceClient(), without torch", "import tinker; tinker.ServiceClient(base_url='http://127.0.0.1:9', api_key='tml-x')", hide_torch=True),
)  # fmt: skip


def measure(case: Case) -> Timing:
    """Measures a case once in a new interpreter."""
    program = PROGRAM.format(statement=case.statement, hide_torch=case.hide_torch, heavy=HEAVY)
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    seconds, modules, heavy = out.split()
    return Timing(case.title, float(seconds), int(modules), heavy)


def run() -> list[Timing]:
    """Returns the medians of several rounds; the cases alternate, so that other load affects all of them."""
    for case in CASES:
        measure(case)  # warms up the file cache and writes bytecode
    rounds = [[measure(case) for case in CASES] for _ in range(ROUNDS)]
    return [
        Timing(t.title, statistics.median(r[i].seconds for r in rounds), t.modules, t.heavy)
        for i, t in enumerate(rounds[0])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    results = run()
    seconds = {t.title: t.seconds for t in results}
    print(f"| what | median of {ROUNDS} | modules | heavy libraries |\n| --- | --- | --- | --- |")
    for t in results:
        print(f"| `{t.title}` | {t.seconds * 1000:.1f} ms | {t.modules} | {t.heavy.replace(',', ', ')} |")
    ratio = seconds["import tinker, without torch"] / seconds["import tinkex"]
    first = seconds["tinker.ServiceClient(), without torch"] / seconds["tinkex.ServiceClient()"]
    print(
        f"\nimport: {ratio:.0f} times faster (aim: at least {AIM}); import and first client: {first:.1f} times faster"
    )
    if options.json:
        options.json.write_text(
            json.dumps({"results": [asdict(t) for t in results], "ratio": ratio}, indent=2)
        )
    if ratio < AIM or results[0].heavy != "none":
        raise SystemExit(1)


if __name__ == "__main__":
    main()
