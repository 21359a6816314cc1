"""A relay before a server that stops in the middle of an answer, until a test lets it go on."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Relay:
    """Passes ``passed`` bytes of the answer to a request whose first line has ``marker``, and then nothing."""

    marker: bytes
    passed: int
    url: str = ""
    asked: list[bytes] = field(default_factory=list)
    """The heads of the requests with the marker."""
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def relay(server: str, marker: str, passed: int) -> Iterator[Relay]:
    """A relay to the server at this address; the server must not mind by which name it is called."""
    there = Relay(marker.encode(), passed)
    upstream = (str(urlsplit(server).hostname), int(urlsplit(server).port or 80))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            marked = threading.Event()
            with socket.create_connection(upstream) as far, contextlib.suppress(OSError):
                answers = threading.Thread(target=self._answers, args=(far, marked), daemon=True)
                answers.start()
                while data := self.request.recv(65536):
                    if there.marker in data.partition(b"\r\n")[0]:
                        there.asked.append(data.partition(b"\r\n\r\n")[0])
                        marked.set()
                    far.sendall(data)
                far.shutdown(socket.SHUT_WR)
                answers.join()

        def _answers(self, far: socket.socket, marked: threading.Event) -> None:
            left = there.passed
            with contextlib.suppress(OSError):
                while data := far.recv(4096):
                    if marked.is_set() and not there.released.is_set():
                        self.request.sendall(data[:left])
                        data, left = data[left:], max(0, left - len(data))
                        if left:
                            continue
                        there.held.set()
                        there.released.wait()
                    self.request.sendall(data)
                self.request.shutdown(socket.SHUT_WR)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as tcp:
        there.url = f"http://127.0.0.1:{tcp.server_address[1]}"
        thread = threading.Thread(target=tcp.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield there
        finally:
            there.released.set()
            tcp.shutdown()
            thread.join()
