"""The reverse proxy of docs/guides/proxy.md: nginx runs with the documented configuration."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import tinkex
from tests.programs import need_program
from tests.servers import serve
from tests.unit.transport.tls import certificates
from tinkex import types

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "proxy.md").read_text()
SITE = re.findall(r"^```nginx\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
MAIN = """
daemon off;
pid {root}/nginx.pid;
error_log {root}/nginx.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
  include {root}/site.conf;
}}
"""


class Proxy:
    """A running nginx and how to reach it."""

    def __init__(self, port: int, authority: Path) -> None:
        self.url = f"https://127.0.0.1:{port}"
        self.authority = authority
        self.trusted = ssl.create_default_context(cafile=str(authority))

    def call(self, url: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(url, data=body, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self.trusted) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()


@contextmanager
def nginx(root: Path, upstream: str) -> Iterator[Proxy]:
    program = need_program("nginx")
    files = certificates(root)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    site = SITE
    for documented, used in {
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "server 127.0.0.1:8787;": f"server {upstream};",
        "/etc/ssl/tinkex/chain.pem": str(files.server),
        "/etc/ssl/tinkex/key.pem": str(files.key),
    }.items():
        assert site.count(documented) == 1
        site = site.replace(documented, used)
    (root / "site.conf").write_text(site)
    user = "user root;" if os.geteuid() == 0 else ""  # its workers read files of this test
    (root / "nginx.conf").write_text(user + MAIN.format(root=root))
    command = [program, "-e", str(root / "nginx.log"), "-p", str(root), "-c", str(root / "nginx.conf")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        proxy = Proxy(port, files.authority)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=30).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, (root / "nginx.log").read_text()
                time.sleep(0.01)
        yield proxy
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_clients_train_and_sample_through_the_documented_proxy(tiny_model: Path, tmp_path: Path) -> None:
    need_program("nginx")
    with (
        serve(tmp_path, "--model", f"tiny={tiny_model}", "--behind-proxy", "127.0.0.1") as server,
        nginx(tmp_path, urlsplit(server.url).netloc) as proxy,
    ):
        config = tinkex.Config(base_url=proxy.url, api_key=server.key, ca_file=str(proxy.authority))
        with tinkex.ServiceClient(config=config) as service:
            training = service.create_lora_training_client("tiny", rank=4)
            tokens = list(range(5, 37))
            datum = types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:]},
            )
            assert training.forward_backward([datum], "cross_entropy").result(120).metrics["loss:sum"] > 0
            sampler = training.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=5, stop=[])
            with sampler.sample_stream(types.ModelInput.from_ints(tokens), 1, params) as stream:
                assert sum(isinstance(event, types.SampledToken) for event in stream) == 5
            saved = training.save_state("kept").result(120)
            archive = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(saved.path)
            url = archive.result(120).url
        # Download URLs have the scheme and host of the proxy.
        assert url.startswith(f"{proxy.url}/")
        assert proxy.call(url)[0] == 200
        # A large body reaches the server, which rejects it for its content.
        large = b'{"model_id":"%s"}' % (b"x" * 5_000_000)
        json_type = {"Content_Type": "application/json", "X_API_Key": server.key}
        status, body = proxy.call(f"{proxy.url}/api/v1/forward_backward", large, **json_type)
        assert status == 400
        assert "forward_backward" in json.loads(body)["detail"]
        # The address of a client is the one that the proxy sees, not the one that the client claims.
        forged = {"X_Forwarded_For": "203.0.113.9", "X_API_Key": "tml-guess"}
        assert proxy.call(f"{proxy.url}/api/v1/sessions", **forged)[0] == 401
        entries = json.loads(proxy.call(f"{proxy.url}/api/v1/audit", X_API_Key=server.key)[1])["entries"]
        hosts = [entry["event_details"]["host"] for entry in entries if entry["event"] == "login_refused"]
        assert hosts == ["127.0.0.1"]


@contextmanager
def upstream(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server for one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:  # nothing has connected
                return
            with connection:
                connection.settimeout(60)
                answer(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        received = connection.recv(65_536)
        assert received, found
        found += received
    return found


def test_the_documented_proxy_passes_on_parts_of_requests_and_responses(tmp_path: Path) -> None:
    """Each side sends its second part only after the other one has received the first."""
    half_arrived, first_event_arrived = threading.Event(), threading.Event()

    def answer(connection: socket.socket) -> None:
        read_until(connection, b"first half")
        half_arrived.set()
        read_until(connection, b"second half")
        event = b"6\r\nfirst\n\r\n"
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            + event
        )
        assert first_event_arrived.wait(60)
        connection.sendall(b"7\r\nsecond\n\r\n0\r\n\r\n")

    with upstream(answer) as address, nginx(tmp_path, address) as proxy:
        port = int(proxy.url.rpartition(":")[2])
        client = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=proxy.trusted)
        client.putrequest("POST", "/api/v1/stream_sample")
        client.putheader("Content-Length", str(len(b"first half second half")))
        client.endheaders()
        client.send(b"first half ")
        assert half_arrived.wait(60)
        client.send(b"second half")
        response = client.getresponse()
        assert response.readline() == b"first\n"
        first_event_arrived.set()
        assert response.read() == b"second\n"
        client.close()
