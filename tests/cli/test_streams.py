"""The command as a process whose streams are unusual: closed, full, of another encoding, read by nobody."""

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


def started(*arguments: str, server: ServedEngine, env: dict[str, str] | None = None, **streams: Any) -> Any:
    """The command to its end, with streams of the test's own."""
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, **(env or {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run([*TINKEX, *arguments], env=environment, check=False, timeout=200, **streams)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_output_that_cannot_be_written_is_said_in_a_line(
    served_engine: ServedEngine, form: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("wb") as full:
        done = started("model", "list", *form, server=served_engine, stdout=full)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"cannot be written" in done.stderr


def test_a_reader_that_has_enough_ends_the_command_without_a_word(served_engine: ServedEngine) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        done = started("model", "list", server=served_engine, stdout=nobody)
    assert (done.returncode, done.stderr) == (1, b"")


def test_letters_a_terminal_has_not_are_replaced_and_json_keeps_them(served_engine: ServedEngine) -> None:
    latin = {"PYTHONIOENCODING": "latin-1"}
    shown = started("train", "sft", "-h", server=served_engine, env=latin)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b'"content": "?"' in shown.stdout
    asked = ("sample", "The sea", "--max-tokens", "40", "--seed", "5", "--json")
    wanted = json.loads(started(*asked, server=served_engine).stdout)
    assert not json.dumps(wanted, ensure_ascii=False).isascii()
    assert json.loads(started(*asked, server=served_engine, env=latin).stdout.decode("ascii")) == wanted


def closed_input() -> None:
    os.close(0)


def test_a_closed_input_is_one_at_its_end(served_engine: ServedEngine) -> None:
    closed: dict[str, Any] = {"server": served_engine, "stdin": None, "preexec_fn": closed_input}
    prompt = started("sample", **closed)
    assert prompt.returncode == 2
    assert b"the prompt is empty" in prompt.stderr
    kept = started("checkpoint", "delete", "tinker://nobody:train:0/weights/a", **closed)
    assert (kept.returncode, kept.stdout) == (0, b"Nothing was deleted.\n")
    key = started("auth", "login", "--with-key", "-", **closed, env={"HOME": "/nonexistent"})
    assert key.returncode == 2
    assert b"the key is empty" in key.stderr


def test_input_that_is_no_text_is_refused(served_engine: ServedEngine) -> None:
    for env in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        done = started("sample", server=served_engine, env=env, stdin=None, input=b"\xff\xfe")
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"cannot be read as text" in done.stderr
        assert b"Traceback" not in done.stderr
    argument = started("sample", os.fsdecode(b"\xff"), server=served_engine)
    assert argument.returncode == 2
    assert b"not UTF-8" in argument.stderr


def test_a_fault_of_ours_is_a_line_too_and_its_trace_is_there_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TINKER_LOG", raising=False)
    error = LookupError("a nail")
    failure = failure_of(error)
    assert (failure.exit_code, failure.type, failure.message) == (1, "LookupError", "LookupError: a nail")
    assert "TINKER_LOG=debug" in str(failure.hint)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TINKER_LOG", "debug")
    failure_of(error)
    assert "LookupError: a nail" in capsys.readouterr().err
    denied = failure_of(PermissionError(13, "Permission denied", "/root/there"))
    assert (denied.message, denied.hint) == ("/root/there: Permission denied", None)


def test_no_error_leaves_a_command_as_an_exception(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKEX_HOME", "~nobody-has-this-name/x")  # Path.expanduser raises RuntimeError
    assert run(["keys", "list"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("Error: RuntimeError: Could not determine home directory.\nHint: ")


def test_wrong_names_are_wrong_usage(served_engine: ServedEngine) -> None:
    for name in ("", "../up", "a b", "x" * 201):
        done = tinkex(
            "checkpoint", "save", "--base-model", "tiny/llama", "--name", name, server=served_engine
        )
        assert (done.code, done.out) == (2, "")
        assert "a checkpoint name is 1–200 characters" in done.err


def test_what_can_be_no_id_is_wrong_usage(served_engine: ServedEngine) -> None:
    for command in (("run", "info"), ("session", "info"), ("checkpoint", "list", "--run-id")):
        for wrong in ("", "a/b", "a?b"):
            done = tinkex(*command, wrong, server=served_engine)
            assert (done.code, done.out) == (2, ""), (command, wrong)


def test_as_many_sessions_as_are_asked_for_are_listed(served_engine: ServedEngine) -> None:
    every = tinkex("session", "list", "--limit", "0", "--json", server=served_engine).json["sessions"]
    assert tinkex("session", "list", "--limit", "1" + "0" * 20, "--json", server=served_engine).code == 0
    some = tinkex("session", "list", "--limit", "1", "--offset", "0", "--json", server=served_engine).json
    assert len(some["sessions"]) == min(1, len(every))


def test_the_command_line_can_be_called_again_and_again() -> None:
    """Modules of commands become attributes of the package when they are loaded; none may take the function's place."""
    program = (
        "from tinkex import cli; import sys\n"
        "sys.exit(sum(cli.run([name, '--help']) for name in ('run', 'version', *cli.COMMANDS)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
