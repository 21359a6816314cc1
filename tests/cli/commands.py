"""The ``tinkex`` command as a process, for tests."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from tests.servers import ServedEngine
from tinkex.cli import run


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def tinkex(
    *arguments: str,
    server: ServedEngine | None = None,
    home: Path | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    process: bool = False,
    **env: str,
) -> Done:
    """Runs the command in this process or in its own; hides the settings of the user."""
    hidden = [name for name in os.environ if name.startswith(("TINKER_", "TINKEX_", "HF_"))]
    env = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "COLUMNS": "300", **env}
    if server is not None:
        env = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, **env}
    if home is not None:
        env = {"HOME": str(home), "TINKEX_HOME": str(home / ".tinkex"), **env}
    if process:
        return _in_process(
            arguments, {k: v for k, v in os.environ.items() if k not in hidden} | env, stdin, cwd
        )
    runner = CliRunner()
    with chdir(cwd or Path.cwd()), runner.isolation(stdin, {**dict.fromkeys(hidden), **env}) as streams:
        code = run(arguments)
    return Done(code, streams[0].getvalue().decode(), streams[1].getvalue().decode())


def _in_process(arguments: tuple[str, ...], env: dict[str, str], stdin: str, cwd: Path | None) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "tinkex", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=cwd,
        input=stdin,
        env=env,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def on_a_terminal(*arguments: str, env: dict[str, str], cwd: Path) -> str:
    """Runs a command on a terminal and returns what it shows."""
    terminal, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", *arguments],
        stdout=child,
        stderr=child,
        cwd=cwd,
        env={**os.environ, "TERM": "xterm", **env},
    )
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(terminal, 65536):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        process.wait(120)
        os.close(terminal)
    assert process.returncode == 0, shown.decode()
    return shown.decode()
