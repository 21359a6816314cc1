"""``tinkex dashboard``: the pages of a data directory, read-only, beside the program that holds it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.commands import tinkex
from tests.servers import ServedEngine, serve

pytestmark = pytest.mark.slow


@contextmanager
def local_dashboard(home: Path) -> Iterator[str]:
    """The address of ``tinkex dashboard --local``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", "dashboard", "--local", "--port", "0"],
        stdout=subprocess.PIPE,
        env={**os.environ, "TINKEX_HOME": str(home)},
        text=True,
    )
    with process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0].rstrip("/")
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_data_directory_is_shown_read_only_beside_the_server_that_holds_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    with serve(tmp_path, "--model", f"tiny={tiny_model}", "--worker", "thread") as server:
        saved = tinkex(
            "checkpoint",
            "save",
            "--base-model",
            "tiny",
            "--name",
            "shown",
            "--rank",
            "2",
            "--json",
            server=server,
        ).json["path"]
        with local_dashboard(tmp_path) as url:
            run_id = saved.removeprefix("tinker://").split("/")[0]
            for page in ("/", "/runs", f"/runs/{run_id}", "/checkpoints", "/usage"):
                status, text = get(f"{url}{page}")
                assert status == 200, text
                assert "read-only" in text
            assert "shown" in get(f"{url}/checkpoints")[1]
            assert "data-action" not in get(f"{url}/checkpoints")[1]
            assert get(f"{url}/playground")[0] == 404
            assert get(f"{url}/", Host="rebound.example")[0] == 403
            assert get(f"{url}/", Origin="http://localhost:3000")[0] == 403


def test_without_engine_data_the_command_says_what_to_do(tmp_path: Path) -> None:
    done = tinkex("dashboard", "--local", "--data-dir", str(tmp_path))
    assert done.code == 1
    assert "contains no engine data" in done.err


def test_for_a_server_the_command_prints_the_address_of_its_pages(served_engine: ServedEngine) -> None:
    assert tinkex("dashboard", server=served_engine).out == f"{served_engine.url}/\n"
    assert get(f"{served_engine.url}/")[0] == 401
    assert tinkex("dashboard").code == 2


def test_no_dashboard_switches_all_pages_off(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path, "--model", f"tiny={tiny_model}", "--no-dashboard", "--worker", "thread") as server:
        for page in ("/", "/runs", "/sign-in", "/dashboard/overview/events"):
            assert get(f"{server.url}{page}")[0] == 404
