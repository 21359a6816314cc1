"""Programs of the system, and Python packages in environments of their own, that some tests need."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

REQUIRED = "TINKEX_REQUIRE_PROGRAMS"
"""Set by .ci/run: a missing program fails the tests that need it, which are skipped otherwise."""


def need_program(name: str) -> str:
    """Returns the path of a program of Debian's package of the same name; skips the test if it is not installed."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")
    return found or not_run(f"{name} is not installed; install it with: apt-get install -y {name}")


def not_run(reason: str) -> str:
    """Skips the test, or fails it where all programs are required."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{reason} ({REQUIRED} is set)", pytrace=False)
    pytest.skip(reason)


def own_environment(name: str, *requirements: str) -> Path:
    """Returns the Python of a virtual environment with these packages, which is made once and reused."""
    place = ROOT / ".venv" / name
    python, ready = place / "bin" / "python", place / "ready"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not ready.exists():
            venv.create(place, with_pip=True)
            install = ["-m", "pip", "install", "-q", "--disable-pip-version-check"]
            done = subprocess.run(
                [str(python), *install, "-c", str(ROOT / "constraints.txt"), *requirements],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                not_run(f"{name} cannot be installed: {done.stderr[-500:]}")
            ready.write_text(sys.version)
    return python
