"""A proxy between a real client and a real server that injects network faults into responses."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

ProxyFault = Callable[["Answer"], None]
"""Forwards one response; when it returns both sides are closed."""


@dataclass
class Answer:
    """The response of a server on one connection, and the client's socket."""

    server: socket.socket
    client: socket.socket
    gone: threading.Event
    """Set when the client has disconnected."""

    def chunks(self) -> Iterator[bytes]:
        """Yields data from the server."""
        while chunk := self.server.recv(65_536):
            yield chunk

    def until(self, words: bytes) -> bytes:
        """Returns the data up to and including these words."""
        data = b""
        while words not in data:
            chunk = self.server.recv(65_536)
            if not chunk:
                break
            data += chunk
        return data[: data.find(words) + len(words)] if words in data else data


@dataclass
class FaultyProxy:
    """Forwards everything, except that ``fault`` handles the first ``times`` responses to ``path``."""

    target: str
    path: str
    fault: ProxyFault
    times: int = 1_000_000
    struck: int = 0
    url: str = ""
    paths: list[str] = field(default_factory=list)

    def carries(self, head: bytes) -> bool:
        path = head.split(b" ", 2)[1].decode() if head.count(b" ") >= 2 else ""
        self.paths.append(path)
        if not path.endswith(self.path) or self.struck >= self.times:
            return False
        self.struck += 1
        return True


@contextmanager
def between(proxy: FaultyProxy) -> Iterator[FaultyProxy]:
    host, port = proxy.target.removeprefix("http://").split(":")
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    proxy.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    ended = threading.Event()
    sockets: list[socket.socket] = []

    def serve(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            first = client.recv(65_536)
            if not first:
                return
            with socket.create_connection((host, int(port))) as server:
                sockets.append(server)
                server.sendall(first)
                over, gone = threading.Event(), threading.Event()
                asking = threading.Thread(
                    target=carry_requests, args=(client, server, over, gone), daemon=True
                )
                asking.start()
                try:
                    if proxy.carries(first):
                        proxy.fault(Answer(server, client, gone))
                    else:
                        carry(server, client)
                finally:
                    over.set()
                    asking.join()  # closing a socket does not wake a thread that waits on it

    def accept() -> None:
        while not ended.is_set():
            try:
                client, _ = listening.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets.append(client)
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield proxy
    finally:
        ended.set()
        hang_up(listening)
        for one in sockets:
            hang_up(one)
        accepting.join()


def carry_requests(
    client: socket.socket, server: socket.socket, over: threading.Event, gone: threading.Event
) -> None:
    """Forwards the client's data until the response is complete, or it disconnects."""
    with contextlib.suppress(OSError, ValueError):
        while not over.is_set():
            if select.select([client], [], [], 0.02)[0]:
                chunk = client.recv(65_536)
                if not chunk:
                    gone.set()
                    server.shutdown(socket.SHUT_RDWR)  # the client disconnected
                    return
                server.sendall(chunk)


def carry(source: socket.socket, sink: socket.socket) -> None:
    """Forwards data of one side until it closes."""
    with contextlib.suppress(OSError):
        while chunk := source.recv(65_536):
            sink.sendall(chunk)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def hang_up(one: socket.socket) -> None:
    """Closes a socket that another thread may be waiting on."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


# ---- faults ----


def byte_by_byte(answer: Answer) -> None:
    """One byte per segment, also in the middle of characters."""
    for chunk in answer.chunks():
        for number in range(len(chunk)):
            answer.client.sendall(chunk[number : number + 1])


def buffers_everything(answer: Answer) -> None:
    """Forwards nothing before the response is complete, like a buffering proxy."""
    answer.client.sendall(b"".join(answer.chunks()))


def cuts_after(words: bytes) -> ProxyFault:
    """The connection closes after these words."""

    def cut(answer: Answer) -> None:
        answer.client.sendall(answer.until(words))

    return cut


def resets_after(words: bytes) -> ProxyFault:
    """The same, by a reset."""

    def reset(answer: Answer) -> None:
        answer.client.sendall(answer.until(words))
        answer.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    return reset


def stalls_after(words: bytes) -> ProxyFault:
    """No more data arrives, and the connection stays open."""

    def stall(answer: Answer) -> None:
        answer.client.sendall(answer.until(words))
        answer.gone.wait(120)

    return stall


def rewrites(change: Callable[[bytes], bytes]) -> ProxyFault:
    """Another body, with its own Content-Length."""

    def rewrite(answer: Answer) -> None:
        data = b"".join(answer.chunks())
        head, _, body = data.partition(b"\r\n\r\n")
        kept = [
            line
            for line in head.split(b"\r\n")
            if not line.lower().startswith((b"transfer-", b"content-length"))
        ]
        changed = change(_unchunked(body))
        lines = [*kept, b"content-length: %d" % len(changed), b"", b""]
        answer.client.sendall(b"\r\n".join(lines) + changed)

    return rewrite


def replies_with(response: bytes) -> ProxyFault:
    """Another response, like a captive portal's."""

    def say(answer: Answer) -> None:
        answer.client.sendall(response)

    return say


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        whole += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return whole
