"""The command as a process with unusual streams: closed, full, in another encoding, without a reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import tinkex
from tests.servers import ServedEngine
from tinkex.cli import run
from tinkex.cli.failures import failure_of

pytestmark = pytest.mark.slow

TINKEX = [sys.executable, "-m", "tinkex"]


def run_process(
    *arguments: str, server: ServedEngine, env: dict[str, str] | None = None, **streams: Any
) -> Any:
    """Runs the command with the given streams."""
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, **(env or {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run([*TINKEX, *arguments], env=environment, check=False, timeout=200, **streams)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_unwritable_stdout_is_one_error_line(served_engine: ServedEngine, form: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run_process("model", "list", *form, server=served_engine, stdout=full)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"cannot be written" in done.stderr


def test_a_closed_pipe_ends_the_command_quietly(served_engine: ServedEngine) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed_pipe:
        done = run_process("model", "list", server=served_engine, stdout=closed_pipe)
    assert (done.returncode, done.stderr) == (1, b"")


def test_characters_outside_the_encoding_are_replaced_in_text_and_escaped_in_json(
    served_engine: ServedEngine,
) -> None:
    latin = {"PYTHONIOENCODING": "latin-1"}
    help_ = run_process("train", "sft", "-h", server=served_engine, env=latin)
    assert (help_.returncode, help_.stderr) == (0, b"")
    assert b'"content": "?"' in help_.stdout
    command = ("sample", "The sea", "--max-tokens", "40", "--seed", "5", "--json")
    expected = json.loads(run_process(*command, server=served_engine).stdout)
    assert not json.dumps(expected, ensure_ascii=False).isascii()
    assert (
        json.loads(run_process(*command, server=served_engine, env=latin).stdout.decode("ascii")) == expected
    )


def close_stdin() -> None:
    os.close(0)


def test_a_closed_stdin_is_treated_as_empty(served_engine: ServedEngine) -> None:
    closed: dict[str, Any] = {"server": served_engine, "stdin": None, "preexec_fn": close_stdin}
    prompt = run_process("sample", **closed)
    assert prompt.returncode == 2
    assert b"the prompt is empty" in prompt.stderr
    aborted = run_process("checkpoint", "delete", "tinker://nobody:train:0/weights/a", **closed)
    assert (aborted.returncode, aborted.stdout) == (1, b"")
    assert b"--yes" in aborted.stderr
    key = run_process("auth", "login", "--with-key", "-", **closed, env={"HOME": "/nonexistent"})
    assert key.returncode == 2
    assert b"the key is empty" in key.stderr


def test_input_that_is_not_utf8_is_rejected(served_engine: ServedEngine) -> None:
    for env in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        done = run_process("sample", server=served_engine, env=env, stdin=None, input=b"\xff\xfe")
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"stdin is not valid UTF-8" in done.stderr
        assert b"Traceback" not in done.stderr
    argument = run_process("sample", os.fsdecode(b"\xff"), server=served_engine)
    assert argument.returncode == 2
    assert b"not UTF-8" in argument.stderr


def test_an_internal_error_is_one_line_and_its_traceback_needs_the_debug_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TINKER_LOG", raising=False)
    error = LookupError("missing")
    failure = failure_of(error)
    assert (failure.exit_code, failure.type, failure.message) == (1, "LookupError", "LookupError: missing")
    assert "TINKER_LOG=debug" in str(failure.hint)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TINKER_LOG", "debug")
    failure_of(error)
    assert "LookupError: missing" in capsys.readouterr().err
    denied = failure_of(PermissionError(13, "Permission denied", "/root/there"))
    assert (denied.message, denied.hint) == ("/root/there: Permission denied", None)


def test_run_never_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TINKEX_HOME", "~nobody-has-this-name/x")  # Path.expanduser raises RuntimeError
    assert run(["keys", "list"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("Error: RuntimeError: Could not determine home directory.\nHint: ")


def test_an_invalid_checkpoint_name_is_a_usage_error(served_engine: ServedEngine) -> None:
    for name in ("", "../up", "a b", "x" * 201):
        done = tinkex(
            "checkpoint", "save", "--base-model", "tiny/llama", "--name", name, server=served_engine
        )
        assert (done.code, done.out) == (2, "")
        assert "a checkpoint name is 1–200 characters" in done.err


def test_an_invalid_id_is_a_usage_error(served_engine: ServedEngine) -> None:
    for command in (("run", "info"), ("session", "info"), ("checkpoint", "list", "--run-id")):
        for wrong in ("", "a/b", "a?b"):
            done = tinkex(*command, wrong, server=served_engine)
            assert (done.code, done.out) == (2, ""), (command, wrong)


def test_session_list_honours_its_limit(served_engine: ServedEngine) -> None:
    every = tinkex("session", "list", "--limit", "0", "--json", server=served_engine).json["sessions"]
    assert tinkex("session", "list", "--limit", "1" + "0" * 20, "--json", server=served_engine).code == 0
    some = tinkex("session", "list", "--limit", "1", "--offset", "0", "--json", server=served_engine).json
    assert len(some["sessions"]) == min(1, len(every))


def test_run_can_be_called_repeatedly() -> None:
    """Loaded command modules become attributes of the package; none may shadow a function of the package."""
    program = (
        "from tinkex import cli; import sys\n"
        "sys.exit(sum(cli.run([name, '--help']) for name in ('run', 'version', *cli.COMMANDS)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
