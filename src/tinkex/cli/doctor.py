"""``tinkex doctor``: checks the installation, the engine and the server, and says how to fix what it finds."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tinkex.cli.groups import Leaf
from tinkex.cli.invocation import Invocation, pass_invocation
from tinkex.errors import SetupError, TinkexError

if TYPE_CHECKING:
    import sqlite3

State = Literal["ok", "note", "problem"]
MARKS: dict[State, str] = {"ok": "✓", "note": "·", "problem": "✗"}
MIN_FREE_BYTES = 2 << 30
ENGINE_FILES = ("engine.db", "engine.lock", "api_key", "checkpoints")

EXTRAS = {
    "engine": (("torch", "safetensors", "starlette", "uvicorn"), "run models on this machine"),
    "hub": (("huggingface_hub",), "download models from the hub and push to it"),
    "plots": (("matplotlib",), "draw loss curves as PNG"),
    "kimi": (("tiktoken",), "tokenize for Kimi models"),
    "ray": (("ray",), "run the workers of a server on a cluster"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check. A ``note`` is information; a ``problem`` prevents something from working."""

    check: str
    state: State
    detail: str
    fix: str | None = None


@click.command(cls=Leaf)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8787,
    show_default=True,
    help="Port for 'tinkex serve'.",
)
@click.option(
    "--compact",
    is_flag=True,
    help="Also rewrite the engine's database without free space; stop the server first.",
)
@pass_invocation
def doctor(invocation: Invocation, port: int, *, compact: bool) -> None:
    """Check the installation, the engine and the server. Exits with code 1 if there is a problem.

    \b
    Examples:
      tinkex doctor
      tinkex doctor --compact
      tinkex doctor --base-url http://127.0.0.1:8787 --json
    """  # noqa: D301 -- click reads the escape as "keep these lines"
    findings: list[Finding] = []
    for finding in _check_all(invocation, port, compact=compact):
        findings.append(finding)
        if not invocation.as_json and not (invocation.quiet and finding.state != "problem"):
            click.echo(f"{MARKS[finding.state]} {finding.check}: {finding.detail}")
            if finding.fix:
                click.echo(f"    {finding.fix}")
    problems = [finding for finding in findings if finding.state == "problem"]
    if invocation.as_json:
        invocation.json({"ok": not problems, "checks": [asdict(finding) for finding in findings]})
    if problems:
        names = ", ".join(finding.check for finding in problems)
        raise SetupError(f"{len(problems)} of {len(findings)} checks failed: {names}. See the fixes above.")


def _check_all(invocation: Invocation, port: int, *, compact: bool) -> Iterator[Finding]:
    from tinkex._version import __version__

    number = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding("installation", "ok", f"tinkex {__version__}, Python {number}")
    yield from extras()
    if find_spec("torch") is not None:
        yield compiled_core()
        yield cached_model()
        yield data_directory(compact=compact)
    if find_spec("torch") is not None and find_spec("uvicorn") is not None:
        yield from configured_lanes()
    yield port_free(port)
    yield free_space(_home())
    yield from server(invocation)


def extras() -> Iterator[Finding]:
    """Which extras are installed."""
    for name, (modules, purpose) in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            fix = f"to {purpose}: pip install 'tinkex[{name}]'"
            yield Finding(f"extra {name}", "note", f"not installed ({', '.join(missing)})", fix)
        else:
            yield Finding(f"extra {name}", "ok", f"installed: can {purpose}")


def compiled_core() -> Finding:
    """Whether the engine samples with its compiled core, and if not, why."""
    import platform

    from tinkex.engine.config import sampler_compute_from_env
    from tinkex.engine.kernels.library import CoreUnavailable, load_core

    check, slow = "compiled core", "sampling runs on torch, at about half the speed"
    compute = sampler_compute_from_env()
    if compute == "torch":
        fix = "unset TINKEX_SAMPLER_COMPUTE"
        return Finding(check, "note", f"disabled by TINKEX_SAMPLER_COMPUTE=torch; {slow}", fix)
    try:
        variant = load_core().variant
    except CoreUnavailable as error:
        if compute == "compiled":
            wanted = "TINKEX_SAMPLER_COMPUTE=compiled requires it"
            return Finding(check, "problem", f"not available: {error.reason}; {wanted}", error.fix)
        return Finding(check, "note", f"not available: {error.reason}; {slow}", error.fix)
    if variant == "portable" and platform.machine().lower() in {"x86_64", "amd64"}:
        slow = "sampling takes about 2.5 times as long as with them"
        return Finding(
            check, "note", f"available (portable): this CPU lacks AVX2, FMA or F16C instructions; {slow}"
        )
    return Finding(check, "ok", f"available ({variant})")


def cached_model() -> Finding:
    """Whether the default model is on this machine."""
    from tinkex.engine.model.cache import ModelCache
    from tinkex.engine.model.catalog import DEFAULT_MODEL
    from tinkex.engine.model.hub import cached_snapshot

    key = DEFAULT_MODEL.replace("/", "--")
    try:
        found = ModelCache(_home() / "models").find(key) or cached_snapshot(DEFAULT_MODEL, None)
    except OSError as error:
        fix = "make it readable, or set TINKEX_HOME to a directory that is"
        return Finding("default model", "problem", f"{error.filename}: {error.strerror}", fix)
    if found is None:
        fix = "it is downloaded at first use (up to 270 MB), or now with: tinkex model pull " + DEFAULT_MODEL
        return Finding("default model", "note", f"{DEFAULT_MODEL} is not on this machine", fix)
    return Finding("default model", "ok", f"{DEFAULT_MODEL} at {found}")


def data_directory(*, compact: bool = False) -> Finding:
    """Whether the data directory is writable, and not in use by another engine; compacts its database with --compact."""
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.store.lock import DirectoryLock

    directory = EngineConfig().engine_dir
    nearest = _nearest_existing(directory)
    error = _write_error(nearest)
    if error is not None:
        fix = "make it writable, or set TINKEX_HOME or TINKEX_DATA_DIR to a directory that is"
        return Finding("data directory", "problem", f"{directory} cannot be written: {error}", fix)
    if nearest != directory:
        return Finding("data directory", "ok", f"{directory} will be created at first use")
    try:
        with DirectoryLock(directory):
            corruption = _database_error(directory / "engine.db")
            if corruption is None and (directory / "engine.db").exists():
                return _database_size(directory / "engine.db", compact=compact)
    except SetupError as in_use:
        if compact:
            return Finding("data directory", "problem", str(in_use), "stop it, then compact the database")
        fix = "use its address with --base-url, or another directory with TINKEX_DATA_DIR"
        return Finding("data directory", "note", str(in_use), fix)
    if corruption is not None:
        fix = "restore engine.db from a backup, or set TINKEX_DATA_DIR to an empty directory"
        return Finding("data directory", "problem", f"{directory / 'engine.db'}: {corruption}", fix)
    return Finding("data directory", "ok", f"{directory} is not in use")


def configured_lanes() -> Iterator[Finding]:
    """The workers that 'tinkex serve' starts with the settings of the environment, and whether their cluster can be reached."""
    from tinkex.cli.server import engine_config
    from tinkex.cli.server_settings import read_settings

    try:
        config = engine_config(read_settings({}))
    except SetupError as error:
        yield Finding("workers", "problem", str(error), "fix the setting, or unset it")
        return
    where = f"on the Ray cluster {config.ray_address}" if config.worker == "ray" else "on this machine"
    if config.most_samplers:
        fewest, most = config.fewest_samplers, config.most_samplers
        number = str(most) if fewest == most else f"{fewest} to {most}"
        what = f"{_count(config.trainers, 'trainer')}, {number} samplers"
    else:
        what = f"{_count(config.trainers, 'worker')} for training and sampling"
    yield Finding("workers", "ok", f"'tinkex serve' starts {what}, {where}")
    if config.worker == "ray":
        yield _cluster(config.ray_address)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cluster(address: str) -> Finding:
    """Whether the configured Ray cluster can be joined, as far as that shows without joining it."""
    from tinkex.engine.lanes.ray_cluster import check_reachable

    if find_spec("ray") is None:
        return Finding("Ray cluster", "problem", "Ray is not installed", "pip install 'tinkex[ray]'")
    if address == "local":
        return Finding("Ray cluster", "ok", "is started with the server, on this machine")
    if address == "auto":
        return Finding(
            "Ray cluster", "ok", "the one of this machine, which the server looks for at its start"
        )
    try:
        check_reachable(address)
    except SetupError as error:
        fix = "start it, check the address (TINKEX_SERVE_RAY), and that no firewall is in between"
        return Finding("Ray cluster", "problem", str(error), fix)
    return Finding("Ray cluster", "ok", f"{address} accepts connections")


def _database_size(path: Path, *, compact: bool) -> Finding:
    """The size of a database that no engine uses, after compacting it with --compact."""
    from contextlib import closing

    from tinkex.cli.render import size
    from tinkex.engine.store.database import Database

    before = size(path.stat().st_size)
    idle = f"{path.parent} is not in use; its database has"
    if compact:
        with closing(Database(path)) as database:
            database.compact()
        return Finding("data directory", "ok", f"{idle} {size(path.stat().st_size)}, {before} before")
    with closing(_read_only(path)) as connection:
        can_shrink = connection.execute("PRAGMA auto_vacuum").fetchone()[0] != 0
    if not can_shrink:
        fix = "to let it shrink when data is deleted: tinkex doctor --compact"
        return Finding("data directory", "note", f"{idle} {before}", fix)
    return Finding("data directory", "ok", f"{idle} {before}")


def _read_only(path: Path) -> sqlite3.Connection:
    import sqlite3

    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def _database_error(database: Path) -> str | None:
    """Why a database cannot be read; None if it can."""
    import sqlite3
    from contextlib import closing

    if not database.exists():
        return None
    try:
        with closing(_read_only(database)) as opened:
            opened.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        return str(error)
    return None


def _nearest_existing(directory: Path) -> Path:
    """The directory, or its nearest parent that exists."""
    while True:
        with suppress(OSError):  # the children of a directory without permissions are not visible
            if directory.exists() or directory.parent == directory:
                return directory
        directory = directory.parent


def _write_error(directory: Path) -> str | None:
    """Why a directory or the engine's files in it cannot be written, found by trying; None if they can."""
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix=".tinkex-doctor-", dir=directory):
            pass
        read_only = [file.name for file in directory.iterdir() if not os.access(file, os.W_OK)]
    except OSError as error:
        return f"{directory}: {error.strerror or error}"
    ours = [name for name in read_only if name in ENGINE_FILES]
    return f"no permission to write {directory / ours[0]}" if ours else None


def port_free(port: int) -> Finding:
    """Whether a server can listen on the port."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            fix = "a server may already be running; otherwise use another port: tinkex serve --port 0"
            return Finding(f"port {port}", "note", f"in use ({error.strerror})", fix)
    return Finding(f"port {port}", "ok", "free")


def free_space(home: Path) -> Finding:
    """Whether there is disk space for models and checkpoints."""
    from tinkex.cli.render import size

    directory = _nearest_existing(home)
    free = shutil.disk_usage(directory).free
    if free < MIN_FREE_BYTES:
        fix = f"free disk space (at least {size(MIN_FREE_BYTES)}), or set TINKEX_HOME to another disk"
        return Finding("disk", "problem", f"{size(free)} free at {directory}", fix)
    return Finding("disk", "ok", f"{size(free)} free at {directory}")


def server(invocation: Invocation) -> Iterator[Finding]:
    """Whether the configured server responds, and accepts the key."""
    from tinkex.config import Config

    try:
        config = Config.resolve(base_url=invocation.base_url, api_key=invocation.api_key, needs_key=False)
    except TinkexError as error:
        yield Finding("settings", "problem", str(error), "fix it, or unset it")
        return
    if config.is_local:
        yield Finding("server", "ok", "none: the engine runs in this process")
        return
    if config.api_key is None and config.credential_cmd is None:
        explicit = invocation.base_url is not None or "TINKER_BASE_URL" in os.environ
        fix = "tinkex auth login, or set TINKER_API_KEY; --local needs no key"
        yield Finding("key", "problem" if explicit else "note", f"none for {config.base_url}", fix)
        return
    config = Config.resolve(
        base_url=invocation.base_url, api_key=invocation.api_key, max_retries=1, timeout=10.0
    )
    yield from _check_server(config)


def _check_server(config: object) -> Iterator[Finding]:
    from tinkex.clients.rest import RestClient
    from tinkex.config import Config
    from tinkex.errors import AuthenticationError

    assert isinstance(config, Config)
    rest = RestClient(config=config)
    try:
        health = rest.get("/api/v1/healthz").result()
    except TinkexError as error:
        fix = "check the address (--base-url, TINKER_BASE_URL) and that the server is running"
        yield Finding("server", "problem", f"{config.base_url} does not respond: {error}", fix)
        return
    yield Finding("server", "ok", f"{config.base_url} responds")
    yield from _running_lanes(health)
    try:
        rest.list_training_runs(limit=1).result()
    except AuthenticationError:
        yield Finding(
            "key", "problem", f"{config.base_url} rejects it", "run tinkex auth login with a valid key"
        )
    except TinkexError as error:
        yield Finding("key", "problem", f"it could not be checked: {error}", "see the message")
    else:
        yield Finding("key", "ok", "accepted")


def _running_lanes(health: Mapping[str, Any]) -> Iterator[Finding]:
    """The workers of a running server, as its health has them."""
    lanes: Mapping[str, Mapping[str, Any]] = health.get("lanes") or {}
    workers = {f"lane {name}": lane for name, lane in lanes.items()}
    if health.get("worker"):
        workers["worker"] = health["worker"]
    for check, worker in workers.items():
        state = worker.get("state", "in the server's process")
        node = f" on node {worker['node']}" if worker.get("node") else ""
        detail = f"{state}{node}, {_count(worker.get('restarts', 0), 'restart')}"
        if state in {"silent", "restarting"}:
            fix = f"see the server's log; its health is {health.get('status')}"
            yield Finding(check, "note", detail, fix)
        else:
            yield Finding(check, "ok", detail)
    if samplers := health.get("samplers"):
        counts = ", ".join(f"{samplers[state]} {state}" for state in ("running", "starting", "draining"))
        limits = f"{samplers['fewest']} to {samplers['most']} with the load"
        yield Finding("samplers", "ok", f"{counts}; {limits}")


def _home() -> Path:
    chosen = os.environ.get("TINKEX_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".tinkex"
