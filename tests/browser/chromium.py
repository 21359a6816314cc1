"""Chromium, driven by Playwright, which has a virtual environment of its own: it is larger than the package."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.programs import own_environment

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP *.test 127.0.0.1",
)


@dataclass(frozen=True)
class Visit:
    """A page to open, and the body of an async function to run in it."""

    url: str
    script: str = "return null"


@dataclass(frozen=True)
class Visited:
    status: int
    value: Any


@dataclass(frozen=True)
class Chromium:
    """A browser. Names under ``.test`` are this machine."""

    executable: str
    profile: Path

    def visit(self, *visits: Visit) -> Sequence[Visited]:
        """Opens pages one after the other, and returns the status of each and the value of its script."""
        order = {
            "executable": self.executable,
            "profile": str(self.profile),
            "flags": FLAGS,
            "visits": [(visit.url, f"async () => {{ {visit.script} }}") for visit in visits],
        }
        done = subprocess.run(
            [playwright(), str(Path(__file__).with_name("visit_pages.py"))],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [Visited(*visited) for visited in json.loads(done.stdout)]


def playwright() -> str:
    """Returns the Python of Playwright's environment, which is made once."""
    return str(own_environment("playwright", "playwright"))
