"""A TCP proxy that stalls in the middle of a response until a test releases it."""

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
    """Forwards ``limit`` bytes of the response to a request whose first line contains ``marker``, then stalls."""

    marker: bytes
    limit: int
    url: str = ""
    heads: list[bytes] = field(default_factory=list)
    """The heads of the requests with the marker."""
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def relay(server: str, marker: str, limit: int) -> Iterator[Relay]:
    """Yields a relay to the server at this URL; the server must accept any Host header."""
    proxy = Relay(marker.encode(), limit)
    upstream = (str(urlsplit(server).hostname), int(urlsplit(server).port or 80))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            marked = threading.Event()
            with socket.create_connection(upstream) as upstream_socket, contextlib.suppress(OSError):
                responses = threading.Thread(
                    target=self._responses, args=(upstream_socket, marked), daemon=True
                )
                responses.start()
                while data := self.request.recv(65536):
                    if proxy.marker in data.partition(b"\r\n")[0]:
                        proxy.heads.append(data.partition(b"\r\n\r\n")[0])
                        marked.set()
                    upstream_socket.sendall(data)
                upstream_socket.shutdown(socket.SHUT_WR)
                responses.join()

        def _responses(self, upstream_socket: socket.socket, marked: threading.Event) -> None:
            left = proxy.limit
            with contextlib.suppress(OSError):
                while data := upstream_socket.recv(4096):
                    if marked.is_set() and not proxy.released.is_set():
                        self.request.sendall(data[:left])
                        data, left = data[left:], max(0, left - len(data))
                        if left:
                            continue
                        proxy.stalled.set()
                        proxy.released.wait()
                    self.request.sendall(data)
                self.request.shutdown(socket.SHUT_WR)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as tcp:
        proxy.url = f"http://127.0.0.1:{tcp.server_address[1]}"
        thread = threading.Thread(target=tcp.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.released.set()
            tcp.shutdown()
            thread.join()
