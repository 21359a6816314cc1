"""A Tinker server on loopback with injected faults."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.scripted import ScriptedServer, find_endpoint
from tinkex._transport.base import Reply, Request
from tinkex.testing import reply

Fault = Callable[[Callable[[bytes], None], bytes], None]
"""Receives a write function and the correct response; then the connection is closed."""


@dataclass
class FaultyServer:
    """Responds correctly, except that ``fault`` is applied to the first ``times`` responses of ``endpoint``."""

    endpoint: str
    fault: Fault
    times: int = 1_000_000
    request_type: str | None = None
    """Applies only to polls for results of this kind."""
    scripted: ScriptedServer = field(default_factory=ScriptedServer)
    requests: list[tuple[str, Request]] = field(default_factory=list)
    struck: int = 0
    url: str = ""

    def bodies(self, name: str) -> list[bytes]:
        return [request.body for called, request in self.requests if called == name]

    def answer(self, request: Request) -> tuple[bytes, Fault | None]:
        row = find_endpoint(request)
        self.requests.append((row.name, request))
        given = self.scripted.handle(request)
        assert isinstance(given, Reply)
        kind = request.headers.get("x-tinker-request-type")
        if (
            row.name == self.endpoint
            and self.struck < self.times
            and (self.request_type is None or kind == self.request_type)
        ):
            self.struck += 1
            return wire(given), self.fault
        return wire(given), None


@contextmanager
def running(server: FaultyServer) -> Iterator[FaultyServer]:
    lock = threading.Lock()

    class Handler(socketserver.StreamRequestHandler):
        disable_nagle_algorithm = True

        def handle(self) -> None:
            try:
                while (request := read(self.rfile)) is not None:
                    with lock:
                        answer, fault = server.answer(request)
                    if fault is not None:
                        fault(self.wfile.write, answer)
                        return
                    self.wfile.write(answer)
            except ConnectionError:
                pass  # the client disconnected

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 128
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as tcp:
        thread = threading.Thread(target=tcp.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        server.url = f"http://127.0.0.1:{tcp.server_address[1]}"
        try:
            yield server
        finally:
            tcp.shutdown()
            thread.join()


def read(stream: Any) -> Request | None:
    first = stream.readline().decode("latin-1").split()
    if not first:
        return None
    headers = {}
    while (line := stream.readline().decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = stream.read(int(headers.get("content-length", "0")))
    return Request(first[0], first[1].partition("?")[0], headers, body)


def wire(given: Reply) -> bytes:
    lines = [f"HTTP/1.1 {given.status} X", f"content-length: {len(given.body)}"]
    lines += [f"{name}: {value}" for name, value in given.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + given.body


# ---- faults ----


def drops(write: Callable[[bytes], None], answer: bytes) -> None:
    """The request is processed, and the connection closes without a response."""


def breaks_off(write: Callable[[bytes], None], answer: bytes) -> None:
    """The connection closes in the middle of the response body."""
    write(answer[:-1])


def sends_garbage(write: Callable[[bytes], None], answer: bytes) -> None:
    write(b"220 mail.example.org ESMTP\r\n\r\n")


def sends_huge_length(write: Callable[[bytes], None], answer: bytes) -> None:
    """The response has a huge Content-Length."""
    write(b"HTTP/1.1 200 X\r\ncontent-length: 99999999999999999\r\n\r\n{}")


def is_slow(write: Callable[[bytes], None], answer: bytes) -> None:
    time.sleep(2.5)  # longer than the client's timeout
    write(answer)


def fails_with(status: int, detail: str = "the server says no") -> Fault:
    """An error status with an explanation."""

    def fault(write: Callable[[bytes], None], answer: bytes) -> None:
        headers = {"connection": "close", "retry-after-ms": "10"}
        write(wire(reply({"detail": detail}, status=status, headers=headers)))

    return fault


def says(body: bytes, content_type: str = "application/json") -> Fault:
    """A successful response with another body."""

    def fault(write: Callable[[bytes], None], answer: bytes) -> None:
        write(wire(Reply(200, {"content-type": content_type, "connection": "close"}, body)))

    return fault
