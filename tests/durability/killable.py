"""A real server process that can be killed and started again on the same data and port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

MODEL = "tiny/llama"


class KillableServer:
    """``tinkex serve``, or with ``often`` the same engine with a savepoint every few operations."""

    def __init__(self, home: Path, model: Path, *, often: int = 0, deterministic: bool = False) -> None:
        self.home = home
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        serve = ["tinkex", "serve", "--port", str(self.port), "--model", f"{MODEL}={model}"]
        program = ["tests.durability.often", str(home), str(model), str(self.port), str(often)]
        self._command = [sys.executable, "-m", *(program if often else serve)]
        if often and deterministic:
            self._command.append("deterministic")
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

    def start(self) -> None:
        """Start, without waiting until it listens."""
        environment = {**os.environ, "TINKEX_HOME": str(self.home)}
        with (self.home / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=log, env=environment
            )

    def wait(self, patience_s: float = 60) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=10):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.05)
        raise AssertionError(f"the server did not answer\n{self.log}")

    def kill(self) -> None:
        """SIGKILL: the process gets no chance to do anything."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        """Kill it and start it again at once."""
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
