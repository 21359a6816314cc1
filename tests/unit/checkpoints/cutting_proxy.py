"""A proxy that cuts uploads: the next PUTs get through up to a number of bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class CuttingProxy:
    """``cut_after`` holds the bytes after which each of the next PUTs with a body is cut; ``sent`` counts what passed."""

    url: str
    cut_after: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """The bytes of each connection that carried a PUT."""

    def carry(self, client: socket.socket, server: socket.socket) -> None:
        """Forwards what a client sends, until it is cut."""
        first = client.recv(65536)
        is_put = first.startswith(b"PUT") and b"content-length: 0" not in first.lower()
        room = self.cut_after.pop(0) if is_put and self.cut_after else None
        total, data = 0, first
        while data:
            data = data if room is None else data[: room - total]
            server.sendall(data)
            total += len(data)
            if room is not None and total >= room:
                break
            data = client.recv(65536)
        if is_put:
            self.sent.append(total)


@contextlib.contextmanager
def cutting_proxy(url: str) -> Iterator[CuttingProxy]:
    target = urlsplit(url)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = CuttingProxy(f"http://127.0.0.1:{listener.getsockname()[1]}")
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = [listener]

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection((target.hostname or "", target.port or 80)) as server:
            sockets.extend((client, server))
            back = threading.Thread(target=reply, args=(server, client))
            back.start()
            with contextlib.suppress(OSError):
                proxy.carry(client, server)
            for end in (server, client):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join()

    def reply(server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                thread = threading.Thread(target=serve, args=(listener.accept()[0],))
                threads.append(thread)
                thread.start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield proxy
    finally:
        for end in sockets:
            with contextlib.suppress(OSError):  # closed already
                end.shutdown(socket.SHUT_RDWR)
        for thread in (accepting, *threads):
            thread.join()
        listener.close()
