"""Operating a server: TLS, health, metrics, logs and shutdown."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.unit.transport.tls import certificates

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[bytes]
    url: str
    key: str
    home: Path
    trusted: ssl.SSLContext | None = None

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def call(self, path: str, body: object = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        sent = {"X-API-Key": self.key, "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self.trusted) as response:
                return response.status, dict(response.headers), response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    def post(self, name: str, body: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call(f"/api/v1/{name}", body)[2])
        return found

    def result(self, request_id: str) -> dict[str, Any]:
        while True:
            status, _, body = self.call(
                "/api/v1/retrieve_future", {"request_id": request_id}, Accept="application/json"
            )
            if status != 408:
                found: dict[str, Any] = json.loads(body)
                return found

    @property
    def listens(self) -> bool:
        try:
            self.call("/api/v1/healthz")
        except OSError:
            return False
        return True

    def metric(self, name: str) -> float:
        text = self.call("/metrics")[2].decode()
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(value)


@contextmanager
def running(home: Path, *arguments: str, trusted: ssl.SSLContext | None = None) -> Iterator[Running]:
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkex", "--json", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "TINKEX_HOME": str(home)},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (home / "log").read_text()
        ready = json.loads(line)
        yield Running(process, ready["url"], ready["api_key"], home, trusted)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_certificate_enables_https(tiny_model: Path, tmp_path: Path) -> None:
    files = certificates(tmp_path)
    trusted = ssl.create_default_context(cafile=str(files.authority))
    arguments = ("--model", f"tiny={tiny_model}", *files.options)
    with running(tmp_path, *arguments, trusted=trusted) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert server.call("/api/v1/healthz")[0] == 200
        config = tinkex.Config(base_url=server.url, api_key=server.key, ca_file=str(files.authority))
        with tinkex.ServiceClient(config=config) as service:
            (model,) = service.get_server_capabilities().supported_models
            assert model.model_name == "tiny"
        plain = server.url.replace("https", "http")
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(f"{plain}/api/v1/healthz", timeout=30)


def test_metrics_and_logs_record_requests_without_secrets(tiny_model: Path, tmp_path: Path) -> None:
    settings = tmp_path / "server.toml"
    settings.write_text('log_format = "json"\naccess_log = true\n')
    with running(tmp_path, "--model", f"tiny={tiny_model}", "--config", str(settings)) as server:
        sampler = {"session_id": server.post("create_session", {})["session_id"], "base_model": "tiny"}
        sampler_id = server.post("create_sampling_session", {**sampler, "sampling_session_seq_id": 0})
        sample = {
            "sampling_session_id": sampler_id["sampling_session_id"],
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [411, 422, 433]}]},
            "sampling_params": {"max_tokens": 5, "stop": []},
        }
        server.result(server.post("asample", sample)["request_id"])
        status, headers, _ = server.call("/api/v1/nowhere", x_request_id="ours-1")
        status, headers, _ = server.call("/api/v1/sessions", x_request_id="ours-2")
        assert (status, headers["x-request-id"]) == (200, "ours-2")
        assert server.metric('tinkex_tokens_total{what="sampled"}') == 5
        assert server.metric('tinkex_requests_total{endpoint="asample",status="200"}') == 1
        assert server.metric('tinkex_health{state="ready"}') == 1
        assert server.call("/metrics", X_API_Key="tml-wrong")[0] == 401
        bearer = server.call("/metrics", X_API_Key="", Authorization=f"Bearer {server.key}")
        assert bearer[0] == 200
        lines = [json.loads(line) for line in server.log.splitlines()]
    calls = {line["operation"]: line for line in lines if line["logger"] == "tinkex.access"}
    assert calls["asample"]["user"] == "local"
    assert calls["asample"]["status"] == 200
    assert calls["asample"]["duration_ms"] > 0
    assert calls["list_sessions"]["request_id"] == "ours-2"
    assert server.key not in server.log
    assert "411" not in server.log


def test_health_is_starting_until_all_models_are_loaded(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tinkex",
            "serve",
            "--port",
            str(port),
            "--no-auth",
            "--model",
            str(tiny_model),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TINKEX_HOME": str(tmp_path)},
    )
    seen: list[tuple[int, str]] = []
    try:
        while process.poll() is None and (not seen or seen[-1][0] != 200):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=30) as answer:
                    seen.append((answer.status, json.loads(answer.read())["status"]))
            except urllib.error.HTTPError as error:
                with error:
                    seen.append((error.code, json.loads(error.read())["status"]))
            except OSError:
                time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert seen[-1] == (200, "ok")
    assert set(seen[:-1]) == {(503, "starting: models are being loaded")}


@pytest.mark.parametrize(
    ("named", "trusted"),
    [(("--behind-proxy", "127.0.0.1"), True), (("--behind-proxy", "10.0.0.5"), False), ((), False)],
)
def test_only_a_proxy_that_is_named_sets_the_client_address(
    named: tuple[str, ...], trusted: bool, tiny_model: Path, tmp_path: Path
) -> None:
    elsewhere = {"X-Forwarded-For": "203.0.113.9"}
    with running(tmp_path, "--model", f"tiny={tiny_model}", *named) as server:
        assert server.call("/api/v1/sessions", **elsewhere, X_API_Key="tml-guess")[0] == 401
        entries = json.loads(server.call("/api/v1/audit")[2])["entries"]
        hosts = [entry["event_details"]["host"] for entry in entries if entry["event"] == "login_refused"]
        assert hosts == ["203.0.113.9" if trusted else "127.0.0.1"]
        # Clients on other machines do not receive directories of the server's machine, whichever proxy forwards them.
        session = server.post("create_session", {})["session_id"]
        create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        run_id = server.result(server.post("create_model", create)["request_id"])["model_id"]
        for headers in (elsewhere, {}):
            _, _, info = server.call("/api/v1/get_info", {"model_id": run_id}, **headers)
            assert (str(tiny_model) in info.decode()) is (headers == {})


def long_pass(run_id: str) -> dict[str, Any]:
    tokens = [5 + index % 200 for index in range(400)]
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": {"data": tokens, "dtype": "int64", "shape": [400]}},
    }
    return {
        "model_id": run_id,
        "seq_id": 1,
        "forward_backward_input": {"data": [datum] * 300, "loss_fn": "cross_entropy"},
    }


@pytest.mark.parametrize("signals", [1, 2])
def test_a_running_operation_does_not_block_the_shutdown_and_runs_at_the_next_start(
    signals: int, tiny_model: Path, tmp_path: Path
) -> None:
    """The first signal waits for at most --shutdown-after-s, the second one exits immediately."""
    timeout = "0.05" if signals == 1 else "1h"
    arguments = ("--model", f"tiny={tiny_model}", "--shutdown-after-s", timeout)
    with running(tmp_path, *arguments) as server:
        session = server.post("create_session", {})["session_id"]
        create = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 4, "seed": 1},
        }
        run_id = server.result(server.post("create_model", create)["request_id"])["model_id"]
        request_id = server.post("forward_backward", long_pass(run_id))["request_id"]
        while server.metric('tinkex_operations{kind="forward_backward",state="running"}') < 1:
            pass
        server.process.send_signal(signal.SIGTERM)
        if signals == 2:
            while server.listens:
                pass
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == (0 if signals == 1 else 128 + signal.SIGTERM)
        assert "will run at the next start" in server.log
        assert "Traceback" not in server.log
    with running(tmp_path, *arguments) as server:
        assert server.result(request_id)["metrics"]["loss:sum"] > 0
