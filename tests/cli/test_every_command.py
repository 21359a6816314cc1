"""Every command on the embedded engine and on a server: --json prints only JSON, --quiet prints no notes.

The list of commands comes from the program, so a new command fails here until it has a case.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from tests.cli.commands import Done, tinkex
from tests.servers import ServedEngine
from tests.unit.checkpoints.hub_standin import hub
from tinkex.cli import tinkex as root

pytestmark = pytest.mark.slow

Command = tuple[str, ...]
TARGETS = ("local", "server")


def leaves(group: click.Command = root, path: Command = ()) -> Iterator[Command]:
    if not isinstance(group, click.Group):
        yield path
        return
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        yield from leaves(command, (*path, name))


class Console:
    """A process that runs several commands, so that its embedded engine starts once."""

    PROGRAM = """
import json, os, sys
from click.testing import CliRunner
from tinkex.cli import run
replies = sys.stdout
for line in sys.stdin:
    request = json.loads(line)
    os.chdir(request["cwd"])
    with CliRunner().isolation(request["stdin"], request["env"]) as streams:
        code = run(request["arguments"])
    out, err = (stream.getvalue().decode() for stream in streams[:2])
    print(json.dumps([code, out, err]), file=replies, flush=True)
"""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            text=True,
        )

    def __call__(self, *arguments: str, stdin: str, cwd: Path, env: Mapping[str, str]) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"arguments": arguments, "stdin": stdin, "cwd": str(cwd), "env": dict(env)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Done(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


class Target:
    """The embedded engine (``local``) or a server, with its own home, model and checkpoint."""

    def __init__(self, name: str, home: Path, server: ServedEngine, model: Path) -> None:
        self.name, self.home, self.server, self.model_dir = name, home, server, model
        self.model = "tiny/llama"
        self.env = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "COLUMNS": "300", "HOME": str(home),
                    "TINKEX_HOME": str(home / ".tinkex"), "TINKEX_MODELS": f"tiny/llama={model}"}  # fmt: skip
        if name == "local":
            self.env |= {"TINKER_BASE_URL": "local"}
        else:
            self.env |= {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
        self._numbers = itertools.count()
        self._console = Console(self.env)
        self.path = self.new_checkpoint()

    def __call__(self, *arguments: str, stdin: str = "", process: bool = False, **env: str) -> Done:
        if process:
            return tinkex(*arguments, stdin=stdin, process=True, cwd=self.home, **{**self.env, **env})
        return self._console(*arguments, stdin=stdin, cwd=self.home, env=env)

    def new(self, kind: str) -> str:
        """Returns a unique name."""
        return f"{kind}-{next(self._numbers)}"

    def new_checkpoint(self) -> str:
        more = ("--name", self.new("walked"), "--kind", "training", "--rank", "2", "--json")
        done = self("checkpoint", "save", "--base-model", self.model, *more)
        path: str = done.json["path"]
        return path

    @property
    def run_id(self) -> str:
        return self.path.removeprefix("tinker://").split("/")[0]

    def close(self) -> None:
        self._console.close()


@pytest.fixture(scope="module", params=TARGETS)
def target(
    request: pytest.FixtureRequest,
    served_engine: ServedEngine,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Target]:
    created = Target(request.param, tmp_path_factory.mktemp(request.param), served_engine, tiny_model)
    yield created
    created.close()


Case = Callable[..., Done]


def plain(*arguments: str) -> Case:
    """A command; arguments may contain the target's {model}, {model_dir}, {path}, {run}, or a {new} name."""

    def case(target: Target, *form: str) -> Done:
        session = target.run_id.split(":")[0]
        args = [
            arg.format(model=target.model, model_dir=target.model_dir, path=target.path, run=target.run_id,
                        session=session, new=target.new("new"))
            for arg in arguments
        ]  # fmt: skip
        return target(*args, *form)

    return case


def train(recipe: str, example: Mapping[str, Any], *options: str) -> Case:
    def case(target: Target, *form: str) -> Done:
        file = target.home / f"{target.new(recipe)}.jsonl"
        file.write_text((json.dumps(example) + "\n") * 3)
        more = ("--rank", "2", "--steps", "1", "--sample-tokens", "2", "-o", str(file.with_suffix("")))
        return target("train", recipe, str(file), *more, *options, *form)

    return case


def chat(target: Target, *form: str) -> Done:
    return target("chat", "--max-tokens", "3", *form, stdin="The sea\n")


def evaluate(target: Target, *form: str) -> Done:
    (target.home / "task.jsonl").write_text('{"prompt": "The sea", "answer": "wet"}\n')
    return target("eval", "task.jsonl", "--max-tokens", "3", *form)


def delete(target: Target, *form: str) -> Done:
    return target("checkpoint", "delete", target.new_checkpoint(), "--yes", *form)


def separate_data_dir(target: Target) -> dict[str, str]:
    """Settings for other processes: the target's engine locks its data directory."""
    return {"TINKEX_DATA_DIR": str(target.home / "separate")}


def push_hf(target: Target, *form: str) -> Done:
    with hub() as created:
        env = {"HF_ENDPOINT": created.url, "HF_TOKEN": created.token, "HF_HUB_OFFLINE": "0",
               "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(target.home / "hf"), **separate_data_dir(target)}  # fmt: skip
        path = target.path
        if target.name == "local":
            new = ("--base-model", target.model, "--name", target.new("up"), "--kind", "training", "--json")
            path = target("checkpoint", "save", *new, process=True, **separate_data_dir(target)).json["path"]
        return target("checkpoint", "push-hf", path, *form, process=True, **env)


def upload(target: Target, *form: str) -> Done:
    folder = target.home / "adapters"
    got = target("checkpoint", "download", target.path, "-o", str(folder), "--force", "--json").json
    return target("checkpoint", "upload", got["destination"], "--base-model", target.model, *form)


def logged_in(target: Target) -> dict[str, str]:
    home = target.home / target.new("home")
    home.mkdir()
    known = ("auth", "login", "--with-key", target.server.key, "--base-url", target.server.url)
    assert target(*known, HOME=str(home)).code == 0
    return {"HOME": str(home)}


def login(target: Target, *form: str) -> Done:
    home = target.home / target.new("home")
    home.mkdir()
    return target("auth", "login", "--with-key", "-", *form, stdin=f"{target.server.key}\n", HOME=str(home))


def logout(target: Target, *form: str) -> Done:
    return target("auth", "logout", *form, **logged_in(target))


def keys(*arguments: str) -> Case:
    """A keys command on the data directory of a server that ran before."""

    def case(target: Target, *form: str) -> Done:
        directory = target.home / "keys"
        if not directory.exists():
            serve_once(target, "--data-dir", str(directory))
        made = target("keys", "create", "ada", "--data-dir", str(directory), "--json").json
        args = [arg.format(key_id=made["key_id"]) for arg in arguments]
        return target("keys", *args, "--data-dir", str(directory), *form)

    return case


def serve_once(target: Target, *arguments: str, command: str = "serve") -> Done:
    """Runs a server until its ready line, then sends SIGINT."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", command, "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **target.env},
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    return Done(process.returncode, line + rest, err)


def serve(target: Target, *form: str) -> Done:
    return serve_once(target, "--data-dir", str(target.home / target.new("served")), *form)


def dashboard(target: Target, *form: str) -> Done:
    if target.name == "local":  # beside the engine that holds the data directory
        return serve_once(target, *form, command="dashboard")
    return target("dashboard", *form)


CHAT = {"prompt": "Q?", "completion": "The sea."}
PAIR = {"prompt": "Q?", "chosen": "The sea.", "rejected": "A dog."}
CASES: Mapping[Command, Case] = {
    ("serve",): serve,
    ("dashboard",): dashboard,
    ("train", "sft"): train("sft", CHAT),
    ("train", "dpo"): train("dpo", PAIR),
    ("train", "grpo"): train("grpo", PAIR, "--reward-regex", "e", "--group-size", "2", "--max-tokens", "2"),
    ("sample",): plain("sample", "The sea", "--max-tokens", "3"),
    ("chat",): chat,
    ("eval",): evaluate,
    ("model", "list"): plain("model", "list"),
    ("model", "pull"): plain("model", "pull", "{model_dir}"),
    ("model", "export"): plain("model", "export", "{model_dir}", "{new}.gguf"),
    ("model", "info"): plain("model", "info", "{model}"),
    ("run", "list"): plain("run", "list"),
    ("run", "info"): plain("run", "info", "{run}"),
    ("checkpoint", "list"): plain("checkpoint", "list"),
    ("checkpoint", "info"): plain("checkpoint", "info", "{path}"),
    ("checkpoint", "save"): plain("checkpoint", "save", "--model-path", "{path}", "--name", "{new}"),
    ("checkpoint", "download"): plain("checkpoint", "download", "{path}", "-o", "{new}"),
    ("checkpoint", "delete"): delete,
    ("checkpoint", "publish"): plain("checkpoint", "publish", "{path}"),
    ("checkpoint", "unpublish"): plain("checkpoint", "unpublish", "{path}"),
    ("checkpoint", "set-ttl"): plain("checkpoint", "set-ttl", "{path}", "--remove"),
    ("checkpoint", "push-hf"): push_hf,
    ("checkpoint", "search"): plain("checkpoint", "search", "--type", "training"),
    ("checkpoint", "upload"): upload,
    ("checkpoint", "merge"): plain("checkpoint", "merge", "{path}", "{new}", "--base-model", "{model_dir}"),
    ("session", "list"): plain("session", "list"),
    ("session", "info"): plain("session", "info", "{session}"),
    ("session", "export-trace"): plain("session", "export-trace", "{session}", "-o", "{new}"),
    ("auth", "login"): login,
    ("auth", "logout"): logout,
    ("auth", "status"): plain("auth", "status"),
    ("auth", "whoami"): plain("auth", "whoami"),
    ("keys", "create"): keys("create", "bob"),
    ("keys", "list"): keys("list"),
    ("keys", "revoke"): keys("revoke", "{key_id}", "--yes"),
    ("billing", "usage"): plain("billing", "usage", "2020-01-01", "2099-01-01"),
    ("billing", "checkpoint-storage"): plain("billing", "checkpoint-storage"),
    ("doctor",): plain("doctor", "--port", "0"),
    ("completion",): plain("completion", "fish"),
    ("version",): plain("version"),
}
REJECTED: Mapping[tuple[str, Command], str] = {
    ("local", ("auth", "login")): "needs no key",
    ("local", ("auth", "whoami")): "needs no key",
}
"""Commands that a target rejects, and a part of the error."""


def test_every_command_has_a_case() -> None:
    assert set(leaves()) == set(CASES)


@pytest.mark.parametrize("command", CASES, ids=" ".join)
def test_json_prints_only_json_and_quiet_prints_no_notes(target: Target, command: Command) -> None:
    rejection = REJECTED.get((target.name, command))
    request = CASES[command](target, "--json")
    if rejection is not None:
        assert (request.code, request.out) == (1, "")
        assert rejection in json.loads(request.err)["message"]
        return
    assert (request.code, request.err) == (0, ""), request.err
    assert isinstance(json.loads(request.out), dict)
    quiet = CASES[command](target, "--quiet")
    assert (quiet.code, quiet.err) == (0, ""), quiet.err
    assert not re.search(r"Traceback|Warning", quiet.out)
