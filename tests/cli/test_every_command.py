"""Every command there is, on the engine in this process and on a server: with --json nothing but JSON, with --quiet no remarks.

The commands come from the program itself, so a new one fails here until it has a case.
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
PLACES = ("local", "server")


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
    """A process that runs one command after the other, so that the engine in it is started once."""

    PROGRAM = """
import json, os, sys
from click.testing import CliRunner
from tinkex.cli import run
answers = sys.stdout
for line in sys.stdin:
    asked = json.loads(line)
    os.chdir(asked["cwd"])
    with CliRunner().isolation(asked["stdin"], asked["env"]) as streams:
        code = run(asked["arguments"])
    out, err = (stream.getvalue().decode() for stream in streams[:2])
    print(json.dumps([code, out, err]), file=answers, flush=True)
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
        asked = {"arguments": arguments, "stdin": stdin, "cwd": str(cwd), "env": dict(env)}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Done(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


class Place:
    """Where commands are sent: ``local`` or a server, with a home, a model and a checkpoint of its own."""

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
        """A name that nothing else has."""
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


@pytest.fixture(scope="module", params=PLACES)
def place(
    request: pytest.FixtureRequest,
    served_engine: ServedEngine,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    there = Place(request.param, tmp_path_factory.mktemp(request.param), served_engine, tiny_model)
    yield there
    there.close()


Case = Callable[..., Done]


def plain(*arguments: str) -> Case:
    """A command whose arguments may speak of the place's {model}, {model_dir}, {path}, {run} or a {new} name."""

    def case(place: Place, *form: str) -> Done:
        session = place.run_id.split(":")[0]
        words = [
            word.format(model=place.model, model_dir=place.model_dir, path=place.path, run=place.run_id,
                        session=session, new=place.new("new"))
            for word in arguments
        ]  # fmt: skip
        return place(*words, *form)

    return case


def train(recipe: str, example: Mapping[str, Any], *options: str) -> Case:
    def case(place: Place, *form: str) -> Done:
        file = place.home / f"{place.new(recipe)}.jsonl"
        file.write_text((json.dumps(example) + "\n") * 3)
        more = ("--rank", "2", "--steps", "1", "--sample-tokens", "2", "-o", str(file.with_suffix("")))
        return place("train", recipe, str(file), *more, *options, *form)

    return case


def delete(place: Place, *form: str) -> Done:
    return place("checkpoint", "delete", place.new_checkpoint(), "--yes", *form)


def apart(place: Place) -> dict[str, str]:
    """For processes of their own: the engine of the place holds its data directory."""
    return {"TINKEX_DATA_DIR": str(place.home / "apart")}


def push_hf(place: Place, *form: str) -> Done:
    with hub() as there:
        env = {"HF_ENDPOINT": there.url, "HF_TOKEN": there.token, "HF_HUB_OFFLINE": "0",
               "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(place.home / "hf"), **apart(place)}  # fmt: skip
        path = place.path
        if place.name == "local":
            new = ("--base-model", place.model, "--name", place.new("up"), "--kind", "training", "--json")
            path = place("checkpoint", "save", *new, process=True, **apart(place)).json["path"]
        return place("checkpoint", "push-hf", path, *form, process=True, **env)


def import_(place: Place, *form: str) -> Done:
    folder = place.home / "adapters"
    got = place("checkpoint", "download", place.path, "-o", str(folder), "--force", "--json").json
    name = place.new("in")
    return place(
        "checkpoint", "import", got["destination"], "--name", name, *form, process=True, **apart(place)
    )


def logged_in(place: Place) -> dict[str, str]:
    home = place.home / place.new("home")
    home.mkdir()
    known = ("auth", "login", "--with-key", place.server.key, "--base-url", place.server.url)
    assert place(*known, HOME=str(home)).code == 0
    return {"HOME": str(home)}


def login(place: Place, *form: str) -> Done:
    home = place.home / place.new("home")
    home.mkdir()
    return place("auth", "login", "--with-key", "-", *form, stdin=f"{place.server.key}\n", HOME=str(home))


def logout(place: Place, *form: str) -> Done:
    return place("auth", "logout", *form, **logged_in(place))


def keys(*arguments: str) -> Case:
    """Keys are the data directory's, whatever server is meant: one that a server was on before."""

    def case(place: Place, *form: str) -> Done:
        directory = place.home / "keys"
        if not directory.exists():
            serve_once(place, "--data-dir", str(directory))
        made = place("keys", "create", "ada", "--data-dir", str(directory), "--json").json
        words = [word.format(key_id=made["key_id"]) for word in arguments]
        return place("keys", *words, "--data-dir", str(directory), *form)

    return case


def serve_once(place: Place, *arguments: str) -> Done:
    """The server until its first line, then Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **place.env},
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    return Done(process.returncode, line + rest, err)


def serve(place: Place, *form: str) -> Done:
    return serve_once(place, "--data-dir", str(place.home / place.new("served")), *form)


CHAT = {"prompt": "Q?", "completion": "The sea."}
PAIR = {"prompt": "Q?", "chosen": "The sea.", "rejected": "A dog."}
CASES: Mapping[Command, Case] = {
    ("serve",): serve,
    ("train", "sft"): train("sft", CHAT),
    ("train", "dpo"): train("dpo", PAIR),
    ("train", "grpo"): train("grpo", PAIR, "--reward-regex", "e", "--group-size", "2", "--max-tokens", "2"),
    ("sample",): plain("sample", "The sea", "--max-tokens", "3"),
    ("model", "list"): plain("model", "list"),
    ("model", "pull"): plain("model", "pull", "{model_dir}"),
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
    ("checkpoint", "import"): import_,
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
REFUSED: Mapping[tuple[str, Command], str] = {
    ("local", ("auth", "login")): "needs no key",
    ("local", ("auth", "whoami")): "needs no key",
    ("server", ("checkpoint", "import")): "--local",
}
"""What makes no sense at a place, and what the refusal says."""


def test_every_command_has_a_case() -> None:
    assert set(leaves()) == set(CASES)


@pytest.mark.parametrize("command", CASES, ids=" ".join)
def test_with_json_there_is_nothing_else_and_with_quiet_no_remark(place: Place, command: Command) -> None:
    refusal = REFUSED.get((place.name, command))
    asked = CASES[command](place, "--json")
    if refusal is not None:
        assert (asked.code, asked.out) == (1, "")
        assert refusal in json.loads(asked.err)["message"]
        return
    assert (asked.code, asked.err) == (0, ""), asked.err
    assert isinstance(json.loads(asked.out), dict)
    quiet = CASES[command](place, "--quiet")
    assert (quiet.code, quiet.err) == (0, ""), quiet.err
    assert not re.search(r"Traceback|Warning", quiet.out)
