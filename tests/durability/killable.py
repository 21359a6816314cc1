"""A real server process that can be killed and started again on the same data and port."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

MODEL = "tiny/llama"
PORTS = range(15_000, 32_000)
"""Below the ephemeral ports: a client that connects while no server listens must not be assigned this port itself."""


class KillableServer:
    """``tinkex serve``; with ``often`` it writes a savepoint every few operations."""

    def __init__(
        self,
        home: Path,
        model: Path,
        *options: str,
        often: int = 0,
        deterministic: bool = False,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home
        self._env = env or {}
        self.port = free_port()
        self._command = [python, "-m", "tinkex", "serve", "--port", str(self.port)]
        self._command += ["--model", f"{MODEL}={model}", *options]
        if often:
            self._command += ["--savepoint-after-operations", str(often)]
        if deterministic:
            self._command.append("--deterministic")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return (self.home / "engine" / "api_key").read_text().strip()

    @property
    def log(self) -> str:
        return (self.home / "serve.log").read_text()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def workers(self) -> list[psutil.Process]:
        """The server's worker processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return [child for child in children if _is_worker(child)]
        return []

    def start(self) -> None:
        """Start, without waiting until it listens."""
        environment = {**os.environ, "TINKEX_HOME": str(self.home), **self._env}
        with (self.home / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=log, env=environment
            )

    def wait(self, timeout_s: float = 180) -> None:
        """Wait until it responds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=10):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.05)
        raise AssertionError(f"the server did not answer\n{self.log}")

    def kill(self) -> None:
        """Send SIGKILL to the server process."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def kill_workers(self) -> int:
        """Send SIGKILL to the worker processes; returns how many there were."""
        killed = 0
        for worker in self.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
                killed += 1
        return killed

    def restart(self) -> None:
        """Kill it and start it again immediately."""
        self.kill()
        self.start()

    def stop(self, timeout_s: float = 180) -> None:
        """Stop it, and check that it exits cleanly."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout_s) == 0, self.log

    def __enter__(self) -> Self:
        self.start()
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()


def free_port() -> int:
    """Returns an unused port outside the ephemeral range."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def _is_worker(process: psutil.Process) -> bool:
    """Whether it is a worker, on a node of Ray too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "tinkex-worker" in process.cmdline()
    return False
