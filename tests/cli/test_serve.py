from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.servers import ServedEngine, serve

pytestmark = pytest.mark.slow

TINKEX = [sys.executable, "-m", "tinkex"]


def run(*arguments: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TINKEX, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TINKEX_HOME": str(home), **env},
    )


def get(url: str, key: str | None = None) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url, headers={} if key is None else {"X-API-Key": key})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    home = tmp_path_factory.mktemp("cli")
    with serve(home, "--model", f"tiny={tiny_model}", "--model", f"Qwen/Qwen3-8B={tiny_model}") as engine:
        yield engine, home


def test_the_ready_line_has_models_url_and_key(server: tuple[ServedEngine, Path]) -> None:
    engine, home = server
    assert re.fullmatch(
        r"tinkex serving tiny, Qwen/Qwen3-8B at http://127\.0\.0\.1:\d+  key tml-\S+\n", engine.line
    )
    assert (home / "engine" / "api_key").read_text().strip() == engine.key
    assert stat.S_IMODE((home / "engine" / "api_key").stat().st_mode) == 0o600
    status, capabilities = get(f"{engine.url}/api/v1/get_server_capabilities", engine.key)
    assert status == 200
    assert [m["model_name"] for m in capabilities["supported_models"]] == ["tiny", "Qwen/Qwen3-8B"]  # type: ignore[index, attr-defined]


def test_a_wrong_key_is_a_401_that_names_the_key_file(server: tuple[ServedEngine, Path]) -> None:
    engine, _ = server
    for key in (None, "tml-wrong"):
        status, body = get(f"{engine.url}/api/v1/get_server_capabilities", key)
        assert status == 401
        assert "api_key" in str(body["detail"])


def test_a_second_engine_on_one_data_directory_names_the_first(
    server: tuple[ServedEngine, Path], tiny_model: Path
) -> None:
    engine, home = server
    done = run("serve", "--port", "0", "--model", str(tiny_model), home=home)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"process {engine.pid}" in done.stderr
    assert "--data-dir" in done.stderr


def test_a_port_in_use_is_an_error_that_suggests_another(
    server: tuple[ServedEngine, Path], tiny_model: Path, tmp_path: Path
) -> None:
    engine, _ = server
    port = engine.url.rsplit(":", 1)[1]
    done = run("serve", "--port", port, "--model", str(tiny_model), home=tmp_path)
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "--port 0" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_key_stays_the_same_and_data_survives_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(tiny_model), "--data-dir", str(tmp_path / "data"))
    with serve(tmp_path, *arguments) as first:
        request = urllib.request.Request(
            f"{first.url}/api/v1/create_session",
            data=b"{}",
            headers={"X-API-Key": first.key, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            session = json.loads(response.read())["session_id"]
    with serve(tmp_path, *arguments) as second:
        assert second.key == first.key
        assert get(f"{second.url}/api/v1/sessions", second.key)[1] == {"sessions": [session]}
    assert not (tmp_path / "engine").exists()


@contextmanager
def started(
    home: Path, *arguments: str, launcher: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Yields a server process that the test stops itself, and its URL; the ``launcher`` executes the server."""
    log = (home / "log").open("ab")
    process = subprocess.Popen(
        [*launcher, *TINKEX, "serve", "--port", "0", "--no-auth", *arguments],
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, "TINKEX_HOME": str(home)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline().decode()
        assert "no key needed" in line, (home / "log").read_text()
        yield process, re.search(r"http://\S+", line)[0]  # type: ignore[index]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        log.close()


def post(url: str, name: str, body: dict[str, object]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{url}/api/v1/{name}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def finished(url: str, name: str, body: dict[str, object]) -> dict[str, Any]:
    _, submitted = post(url, name, body)
    while True:
        status, result = post(url, "retrieve_future", {"request_id": submitted["request_id"]})
        if status != 408:
            return result


def new_run(url: str) -> str:
    session = post(url, "create_session", {})[1]["session_id"]
    request = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    run_id: str = finished(url, "create_model", request)["model_id"]
    return run_id


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_cleanly_while_clients_wait(
    number: signal.Signals, tiny_model: Path, tmp_path: Path
) -> None:
    with started(tmp_path, "--model", f"tiny={tiny_model}") as (process, url):
        step = {"model_id": new_run(url), "seq_id": 2, "adam_params": {}}
        _, blocked = post(url, "optim_step", step)
        statuses: list[int] = []
        poll = threading.Thread(
            target=lambda: statuses.append(
                post(url, "retrieve_future", {"request_id": blocked["request_id"]})[0]
            )
        )
        poll.start()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as idle:
            idle.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in idle.recv(4096)
            process.send_signal(number)
            assert process.wait(20) == 0
        poll.join()
        assert statuses == [408]
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_server_under_nohup_survives_the_terminal_and_stops_on_sigterm(
    tiny_model: Path, tmp_path: Path
) -> None:
    nohup = ("sh", "-c", 'trap "" HUP INT; exec "$@"', "sh")
    with started(tmp_path, "--model", f"tiny={tiny_model}", launcher=nohup) as (process, url):
        process.send_signal(signal.SIGHUP)
        assert new_run(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_after_sigkill_a_restarted_server_resumes(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--model", f"tiny={tiny_model}")
    with started(tmp_path, *arguments) as (process, url):
        run_id = new_run(url)
        path = finished(url, "save_weights", {"model_id": run_id, "seq_id": 1, "path": "kept"})["path"]
        snapshot = {"model_id": run_id, "seq_id": 2, "sampling_session_seq_id": 0}
        sampler = finished(url, "save_weights_for_sampler", snapshot)["sampling_session_id"]
        _, pending = post(url, "optim_step", {"model_id": run_id, "seq_id": 4, "adam_params": {}})
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    with started(tmp_path, *arguments) as (_, url):
        first = finished(url, "optim_step", {"model_id": run_id, "seq_id": 3, "adam_params": {}})
        second = post(url, "retrieve_future", {"request_id": pending["request_id"]})[1]
        assert [answer["metrics"]["step:unique"] for answer in (first, second)] == [1, 2]
        sample = {
            "sampling_session_id": sampler,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 2, "stop": []},
        }
        assert len(finished(url, "asample", sample)["sequences"]) == 1
        session = post(url, "create_session", {})[1]["session_id"]
        load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        assert finished(url, "load_weights", load)["model_id"] == f"{session}:train:0"


def test_no_auth_is_rejected_on_addresses_other_machines_can_reach(tmp_path: Path) -> None:
    done = run("serve", "--host", "0.0.0.0", "--no-auth", home=tmp_path)
    assert done.returncode == 1
    assert "--no-auth" in done.stderr


def test_a_missing_model_is_an_error_that_explains_the_model_option(tmp_path: Path) -> None:
    done = run("serve", "--port", "0", "--model", str(tmp_path / "nothing" / "here"), home=tmp_path)
    assert done.returncode == 1
    assert "here" in done.stderr
    assert "--model" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_sources_with_one_name_are_rejected(tiny_model: Path, tmp_path: Path) -> None:
    done = run("serve", "--model", f"m={tiny_model}", "--model", f"m={tmp_path}", home=tmp_path)
    assert done.returncode == 1
    assert "two models have the name m" in done.stderr


def test_version_and_help(tmp_path: Path) -> None:
    assert re.fullmatch(r"tinkex \d+\.\d+\.\d+\S*\n", run("version", home=tmp_path).stdout)
    for arguments in (["-h"], ["serve", "-h"]):
        help_text = run(*arguments, home=tmp_path)
        assert help_text.returncode == 0
        assert "Examples:\n    tinkex serve\n" in help_text.stdout
    wrong = run("serve", "--prot", "1", home=tmp_path)
    assert wrong.returncode == 2
    assert "--port" in wrong.stderr


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['tinkex', 'serve', '-h']\n"
        "from tinkex.cli import main\n"
        "main()\n"
        "print('LOADED', *sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.rpartition("LOADED")[2].split()}
    assert not loaded & {"torch", "starlette", "uvicorn", "numpy", "msgspec", "asyncio"}


def test_with_json_the_ready_line_is_json(tiny_model: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*TINKEX, "--json", "serve", "--port", "0", "--model", f"tiny={tiny_model}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TINKEX_HOME": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert ready["models"] == ["tiny"]
    assert ready["api_key"].startswith("tml-")
    assert (out, err) == (b"", b"")
    assert run("--local", "serve", home=tmp_path).returncode == 2
