"""A program of the official client is judged by what it did, not by how its interpreter was torn down."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.official_process import official_command

pytestmark = pytest.mark.slow


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        official_command(*arguments), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_process_that_would_abort_while_it_exits_ends_as_its_program_did(tmp_path: Path) -> None:
    program = "import atexit, os, sys\natexit.register(os.abort)\nprint(sys.argv[1:])\n"
    file = tmp_path / "program.py"
    file.write_text(program)
    for arguments in (["-c", program], [str(file)]):
        done = run(*arguments, "one", "--two")
        assert (done.returncode, done.stdout) == (0, "['one', '--two']\n"), done.stderr


def test_a_program_that_fails_ends_with_its_status() -> None:
    assert run("-c", "import sys; sys.exit(3)").returncode == 3
    refused = run("-c", "raise SystemExit('no such file')")
    assert (refused.returncode, refused.stderr) == (1, "no such file\n")
    failed = run("-c", "raise ValueError('seven')")
    assert failed.returncode == 1
    assert "ValueError: seven" in failed.stderr
    assert run("-m", "json.tool", "--help").stdout.startswith("usage:")
