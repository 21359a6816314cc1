"""A proxy between a real client and a real server that does to answers what networks do."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Mischief = Callable[["Answer"], None]
"""Carries one answer; when it returns both sides are closed."""


@dataclass
class Answer:
    """What a server says on one connection, and a way to the client."""

    server: socket.socket
    client: socket.socket
    gone: threading.Event
    """Set when the client has hung up."""

    def pieces(self) -> Iterator[bytes]:
        """What comes from the server."""
        while piece := self.server.recv(65_536):
            yield piece

    def until(self, words: bytes) -> bytes:
        """What comes up to and with these words, and not a byte more."""
        said = b""
        while words not in said:
            piece = self.server.recv(65_536)
            if not piece:
                break
            said += piece
        return said[: said.find(words) + len(words)] if words in said else said


@dataclass
class MischievousProxy:
    """Passes everything on, except that ``mischief`` carries the first ``times`` answers to ``path``."""

    target: str
    path: str
    mischief: Mischief
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
def between(proxy: MischievousProxy) -> Iterator[MischievousProxy]:
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
                        proxy.mischief(Answer(server, client, gone))
                    else:
                        carry(server, client)
                finally:
                    over.set()
                    asking.join()  # a socket that a thread waits on is not closed by closing it

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
    """Passes on what the client says until the answer is over, or it hangs up."""
    with contextlib.suppress(OSError, ValueError):
        while not over.is_set():
            if select.select([client], [], [], 0.02)[0]:
                piece = client.recv(65_536)
                if not piece:
                    gone.set()
                    server.shutdown(socket.SHUT_RDWR)  # a client that hangs up wants no answer
                    return
                server.sendall(piece)


def carry(source: socket.socket, sink: socket.socket) -> None:
    """Passes on what one side says until it ends."""
    with contextlib.suppress(OSError):
        while piece := source.recv(65_536):
            sink.sendall(piece)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def hang_up(one: socket.socket) -> None:
    """Ends a socket that another thread may be waiting on."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


# ---- what it does ----


def byte_by_byte(answer: Answer) -> None:
    """Every byte in a segment of its own, also in the middle of characters."""
    for piece in answer.pieces():
        for number in range(len(piece)):
            answer.client.sendall(piece[number : number + 1])


def holds_all_back(answer: Answer) -> None:
    """Nothing is passed on before the answer is over, as proxies that buffer do."""
    answer.client.sendall(b"".join(answer.pieces()))


def cuts_after(words: bytes) -> Mischief:
    """The connection ends when these words have passed."""

    def cut(answer: Answer) -> None:
        answer.client.sendall(answer.until(words))

    return cut


def resets_after(words: bytes) -> Mischief:
    """The same, by a reset."""

    def reset(answer: Answer) -> None:
        answer.client.sendall(answer.until(words))
        answer.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    return reset


def falls_silent_after(words: bytes) -> Mischief:
    """Nothing more comes, and nobody hangs up."""

    def fall_silent(answer: Answer) -> None:
        answer.client.sendall(answer.until(words))
        answer.gone.wait(120)

    return fall_silent


def rewrites(change: Callable[[bytes], bytes]) -> Mischief:
    """Another body, in one piece and with its own length."""

    def rewrite(answer: Answer) -> None:
        said = b"".join(answer.pieces())
        head, _, body = said.partition(b"\r\n\r\n")
        kept = [
            line
            for line in head.split(b"\r\n")
            if not line.lower().startswith((b"transfer-", b"content-length"))
        ]
        changed = change(_unchunked(body))
        lines = [*kept, b"content-length: %d" % len(changed), b"", b""]
        answer.client.sendall(b"\r\n".join(lines) + changed)

    return rewrite


def says_instead(said: bytes) -> Mischief:
    """Something else altogether, as portals that want a login do."""

    def say(answer: Answer) -> None:
        answer.client.sendall(said)

    return say


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        whole += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return whole
