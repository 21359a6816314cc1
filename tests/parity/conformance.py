"""Every public method of the official client, of several versions, against `tinkex serve`; and the table of it.

``python -m tests.parity.conformance`` writes docs/conformance.md.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.models import tiny_llama
from tests.official_process import official_command
from tests.servers import ServedEngine, serve
from tests.unit.checkpoints.hub_standin import hub
from tinkex._wire.endpoints import ENDPOINTS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "conformance.md"
PROBE = Path(__file__).with_name("probe.py")
COMMANDS_PROBE = Path(__file__).with_name("probe_commands.py")
MODEL = "tiny/llama"

VERSIONS = ("0.6.1", "0.13.1", "0.18.2", "0.25.0", "0.36.0", "0.38.0")
"""The first with today's names; the last without protobuf; the first with protobuf results; the first with protobuf
requests; the last whose methods return values, futures and clients directly; the newest, whose methods return an ``APIFuture``."""

GENERATIONS = (
    "What was checked against a package, and what against documentation only:",
    "",
    "- The versions in these tables are packages of the index: their unmodified code ran against the server. The names, signatures and forms of the",
    "  results of our client are compared with the packages 0.36.0 and 0.38.0 ([API comparison](surface.md)). Twenty programs in the styles of",
    "  both generations find the same with these packages and with our client (`tests/parity/test_generations.py`, `tests/contract/test_generations.py`).",
    "- 0.37 and 0.39 were not on the index. What 0.39 adds, the uploads and the checkpoint search, is checked with programs written from its",
    "  documentation, run with our client (`tests/contract/test_uploads.py`), never with the official one; the path of the search is inferred",
    "  from that of sessions. The newest package on the index was 0.38.0 on 2026-11-19; it makes none of these calls.",
)

REJECTED: Mapping[str, str] = {}
"""Methods that our server rejects, with the reason; there are none."""

Results = Mapping[str, Mapping[str, str]]
"""Version → method → "works", or how it failed."""


def installed(package: str, version: str) -> Path:
    """Where a version of an official package lies, fetched by pip if it is not there yet; its dependencies are ours."""
    folder = Path(sys.prefix) / "official-packages" / f"{package}-{version}"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(dir=sys.prefix) as temporary:
            target = Path(temporary) / "packages"
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(target),
            ]
            subprocess.run([*command, f"{package}=={version}"], check=True)
            target.rename(folder)
    return folder


def probe(version: str, server: ServedEngine, model: Path) -> Mapping[str, str]:
    """What every method of one version does; ``model`` is the directory of the served model."""
    where = {"PYTHONPATH": str(installed("tinker", version))}
    return _run([str(PROBE), server.url, server.key, str(model)], server, where)


def probe_commands(server: ServedEngine) -> Mapping[str, str]:
    """What every command of the newest `tinker` does, for a user who has never used it; the hub is a stand-in."""
    with tempfile.TemporaryDirectory() as home, hub() as there:
        where = {"PYTHONPATH": str(installed("tinker", VERSIONS[-1]))}
        login = {"HF_ENDPOINT": there.url, "HF_TOKEN": there.token, "HF_HOME": home, "HF_HUB_OFFLINE": "0"}
        return _run(
            [str(COMMANDS_PROBE), server.key],
            server,
            {"HOME": home, "HF_HUB_DISABLE_XET": "1", **where, **login},
        )


def _run(program: list[str], server: ServedEngine, more: Mapping[str, str]) -> Mapping[str, str]:
    login = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, "TINKER_TELEMETRY": "0"}
    environment = {**os.environ, **login, "PYTHONFAULTHANDLER": "1", **more}
    command = official_command(*program)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        raise AssertionError(
            f"{program[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}"
        )
    results: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def render(results: Results, commands: Mapping[str, str]) -> str:
    """The tables, as Markdown."""
    methods = sorted({method for found in results.values() for method in found}, key=_order)
    lines = [
        "# Conformance",
        "",
        "Every public method of the official client, unmodified, called against `tinkex serve`, by version of the `tinker`",
        "package. Generated by `python -m tests.parity.conformance`; `tests/parity/test_conformance.py` fails when a method does.",
        "A dash: that version has no such method.",
        "",
        *GENERATIONS,
        "",
        "| method | " + " | ".join(results) + " |",
        "| --- |" + " --- |" * len(results),
    ]
    for method in methods:
        cells = [_cell(method, found.get(method)) for found in results.values()]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    counts = [f"{version}: {len(found)}" for version, found in results.items()]
    lines += ["", f"Methods driven: {', '.join(counts)}.", "", f"## The `tinker` command, {VERSIONS[-1]}", ""]
    lines += ["| command | result |", "| --- | --- |"]
    lines += [f"| `tinker {name}` | {result} |" for name, result in commands.items()]
    return "\n".join([*lines, "", *endpoints_section()]) + "\n"


def endpoints_section() -> list[str]:
    """The endpoint table: which calls are the official protocol's, and which are ours."""
    extensions = [entry for entry in ENDPOINTS.values() if entry.extension]
    lines = [
        "## Endpoints",
        "",
        f"The server serves {len(ENDPOINTS)} endpoints: {len(ENDPOINTS) - len(extensions)} of the official protocol, and these extensions, which no version",
        "of the official client calls and other servers may not serve:",
        "",
        "| extension | method | path |",
        "| --- | --- | --- |",
    ]
    return [*lines, *(f"| `{entry.name}` | {entry.method} | `{entry.path}` |" for entry in extensions)]


def _cell(method: str, result: str | None) -> str:
    if result is None:
        return "–"
    return (
        f"rejected: {REJECTED[method]}"
        if result != "works" and method in REJECTED
        else result.replace("|", "\\|")
    )


def _order(method: str) -> tuple[int, str]:
    clients = ["ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"]
    return clients.index(method.partition(".")[0]), method


def main() -> None:
    """Write the table."""
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        model = tiny_llama(home / "model")
        with serve(home, "--model", f"{MODEL}={model}") as server:
            results = {version: probe(version, server, model) for version in VERSIONS}
            DOCUMENT.write_text(render(results, probe_commands(server)), "utf-8")
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
