"""How long `import tinkex` takes beside `import tinker`, each in fresh interpreters, in one run.

    python benchmarks/bench_import.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROUNDS = 9
FORBIDDEN = ("torch", "transformers", "pydantic", "httpx", "aiohttp", "pyqwest", "requests")
PROGRAM = """
import sys, time
base = len(sys.modules)
start = time.perf_counter()
import {module}
elapsed = time.perf_counter() - start
heavy = [name for name in {forbidden!r} if name in sys.modules]
print(elapsed, len(sys.modules) - base, ",".join(heavy))
"""


def measure(module: str) -> tuple[float, int, list[str]]:
    """Seconds, modules loaded, and which heavy libraries were among them, for one import."""
    program = PROGRAM.format(module=module, forbidden=FORBIDDEN)
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    seconds, modules, *heavy = out.split()
    return float(seconds), int(modules), heavy[0].split(",") if heavy else []


def run() -> dict[str, dict[str, object]]:
    """Median of several rounds, the two packages taking turns so that load falls on both."""
    seconds: dict[str, list[float]] = {"tinkex": [], "tinker": []}
    facts: dict[str, tuple[int, list[str]]] = {}
    for module in seconds:
        measure(module)  # warms the file cache and writes the bytecode
    for _ in range(ROUNDS):
        for module, times in seconds.items():
            elapsed, modules, heavy = measure(module)
            times.append(elapsed)
            facts[module] = (modules, heavy)
    return {
        module: {"seconds": statistics.median(times), "modules": facts[module][0], "heavy": facts[module][1]}
        for module, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    results = run()
    ratio = float(str(results["tinker"]["seconds"])) / float(str(results["tinkex"]["seconds"]))
    print("| import | median of 9 | modules loaded | heavy libraries |\n| --- | --- | --- | --- |")
    for module, result in results.items():
        heavy = ", ".join(map(str, result["heavy"])) or "none"  # type: ignore[call-overload]
        print(f"| `{module}` | {float(str(result['seconds'])) * 1000:.1f} ms | {result['modules']} | {heavy} |")
    print(f"\n`import tinkex` is {ratio:.0f} times faster than `import tinker` (aim: at least 8).")
    if options.json:
        options.json.write_text(json.dumps({**results, "ratio": ratio}, indent=2))


if __name__ == "__main__":
    main()
