"""Shell completion: bash in a pseudo-terminal, zsh and fish through their protocols."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import tinkex


class Shell:
    """An interactive bash in a pseudo-terminal."""

    def __init__(self, directory: Path) -> None:
        command = directory / "tinkex"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tinkex "$@"\n')
        command.chmod(0o755)
        bash = shutil.which("bash")
        assert bash is not None
        path = f"{directory}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PS1": "ready> ", "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.execve(bash, ["bash", "--norc", "--noprofile", "-i"], environment)

    def type(self, keys: str, until: str) -> None:
        """Sends keys and waits for output that matches ``until``."""
        os.write(self._terminal, keys.encode())
        output = ""
        deadline = time.monotonic() + 100
        while re.search(until, output) is None:
            assert time.monotonic() < deadline, output
            if select.select([self._terminal], [], [], 0.1)[0]:
                output += os.read(self._terminal, 65536).decode(errors="replace")

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._pid, 0)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    opened = Shell(tmp_path)
    yield opened
    opened.close()


@pytest.mark.slow
def test_bash_completes_commands_options_choices_and_files(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "my-chats.jsonl").touch()
    shell.type('source <(tinkex completion bash); echo lo"ad"ed\n', r"loaded\s+ready> ")
    shell.type("tinkex che\t", r"tinkex checkpoint $")
    shell.type("pus\t", r"push-hf $")
    shell.type("\x15tinkex sample --max\t", r"--max-tokens $")
    shell.type("\x15tinkex train sft x --schedule co\t\t", r"constant +cosine")
    shell.type(f"\x15tinkex train sft {tmp_path}/my-ch\t", r"/my-chats\.jsonl $")


def test_zsh_receives_completions_with_descriptions() -> None:
    env = {"_TINKEX_COMPLETE": "zsh_complete", "COMP_WORDS": "tinkex che", "COMP_CWORD": "1"}
    assert tinkex(process=True, **env).out.splitlines()[:2] == ["plain", "checkpoint"]
    script = tinkex("completion", "zsh").out
    assert "_TINKEX_COMPLETE=zsh_complete" in script
    assert "compdef _tinkex_completion tinkex" in script


def test_fish_receives_completions_with_descriptions() -> None:
    env = {"_TINKEX_COMPLETE": "fish_complete", "COMP_WORDS": "tinkex che", "COMP_CWORD": "che"}
    (line,) = tinkex(process=True, **env).out.splitlines()
    assert line.startswith("plain,checkpoint\t")
    assert "_TINKEX_COMPLETE=fish_complete" in tinkex("completion", "fish").out
