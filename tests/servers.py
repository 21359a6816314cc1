"""`tinkex serve` as a real process, for tests."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.sessions import close_sessions

READY = re.compile(r"(https?://\S+)(?:.*?(tml-\S+))?")


@dataclass(frozen=True)
class ServedEngine:
    """A running server: where it listens and the key it takes."""

    url: str
    key: str
    pid: int
    line: str


@contextmanager
def serve(
    home: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    patience_s: float = 120,
    launcher: Sequence[str] = (),
    python: str = sys.executable,
) -> Iterator[ServedEngine]:
    """Starts a server on a free port, waits for its one line, and stops it by SIGTERM at the end.

    The ``launcher`` executes the server.
    """
    command = [*launcher, python, "-m", "tinkex", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "TINKEX_HOME": str(home), **(env or {})}
    log = (home / "serve.log").open("wb")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
    try:
        line = _first_line(process, patience_s)
        match = READY.search(line)
        if match is None:
            log.flush()
            raise AssertionError(f"the server said {line!r}\n{(home / 'serve.log').read_text()}")
        yield ServedEngine(match[1], match[2] or "tml-none", process.pid, line)
        close_sessions(match[1])  # while the server still answers
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()
            log.close()
    assert process.returncode == 0, (home / "serve.log").read_text()


def _first_line(process: subprocess.Popen[bytes], patience_s: float) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and process.poll() is None:
        ready, _, _ = select.select([process.stdout], [], [], 0.2)
        if ready:
            return process.stdout.readline().decode()
    return ""
