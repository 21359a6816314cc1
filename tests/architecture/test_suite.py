"""What the test suite itself must keep to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import REQUIRED, need_program

ROOT = Path(__file__).parents[2]


def test_children_of_a_suite_in_the_background_can_be_interrupted() -> None:
    """A shell starts background jobs with SIGINT ignored, and children would inherit that."""
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    suite = f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", suite],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


LEAKS = """
import socket

def test_leaves_a_socket_open_in_a_cycle():
    holder = [socket.socket()]
    holder.append(holder)
"""


@pytest.mark.slow
def test_a_socket_that_a_module_leaves_open_fails_that_module_and_not_the_next(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(LEAKS)
    (tmp_path / "test_second.py").write_text("def test_nothing():\n    pass\n")
    options = ["-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:randomly", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed, 1 error" in done.stdout
    assert "unclosed <socket" in done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert len(failed) == 1
    assert "test_first.py" in failed[0]


def test_a_missing_program_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install -y no-such-program"):
        need_program("no-such-program")
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install -y no-such-program"):
        need_program("no-such-program")
