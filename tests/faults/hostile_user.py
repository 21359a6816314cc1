"""A user with a valid key who abuses a server in every known way at the same time.

A program of its own, so that it takes no time from the polite user's: ``python -m tests.faults.hostile_user URL KEY SECONDS
BEHAVIOUR…``. Each behaviour is a generator of attempts, with a thread of its own; its rate is bounded, because what is tested
is what the server does, not how fast this machine is. Prints how often each behaviour got which status, as JSON.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import zstandard

from tinkex._wire import proto as wire_proto
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput

MODEL = "tiny/llama"
PAUSE_S = 0.05
NUM_ITEMS = 4_000_000
NUM_SOCKETS = 300
NUM_UNREAD = 40
PROTO = "application/x-protobuf"
SOURCE = ("127.0.0.2" if sys.platform == "linux" else "127.0.0.1", 0)
"""Another address than that of the polite user, as users of a server have."""


class Server:
    """Sends requests as they are, without retries, and counts the statuses."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self.address = (str(parts.hostname), int(parts.port or 80))
        self._key = key
        self.statuses: Counter[str] = Counter()
        self._numbers = itertools.count()

    def post(self, name: str, body: bytes | Mapping[str, Any], **headers: str) -> Any:
        """The decoded reply, or None for a rejection."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"x-api-key": self._key, "content-type": "application/json"}
        given |= {field.replace("_", "-"): value for field, value in headers.items()}
        connection = http.client.HTTPConnection(*self.address, timeout=60, source_address=SOURCE)
        try:
            connection.request("POST", f"/api/v1/{name}", content, given)
            reply = connection.getresponse()
            answer = reply.read()
        except OSError as error:
            self.statuses[type(error).__name__] += 1
            return None
        finally:
            connection.close()
        self.statuses[str(reply.status)] += 1
        return json.loads(answer) if reply.status == 200 else None

    def head(self, name: str, length: int) -> bytes:
        """The head of a JSON request."""
        fields = (
            f"Host: x\r\nX-API-Key: {self._key}\r\nContent-Type: application/json\r\nContent-Length: {length}"
        )
        return f"POST /api/v1/{name} HTTP/1.1\r\n{fields}\r\n\r\n".encode()

    def session(self, **fields: Any) -> str | None:
        """A new session, or None if there is none for this user."""
        answer = self.post("create_session", {"tags": [], "sdk_version": "1", **fields})
        return answer["session_id"] if answer is not None else None

    def run(self, rank: int = 4) -> tuple[str, str] | None:
        """A new session and a run in it, or None."""
        session = self.session()
        if session is None:
            return None
        request = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": rank, "seed": 1},
            "type": "create_model",
        }
        answer = self.post("create_model", request)
        return (session, answer["model_id"]) if answer is not None else None

    def upload(self, session: str, nodes: list[dict[str, Any]]) -> str | None:
        """The id of a custom loss of these nodes, or None."""
        number = next(self._numbers)
        request = {
            "session_id": session,
            "custom_loss_seq_id": number,
            "name": "loss",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": nodes},
            "type": "create_custom_loss",
        }
        answer = self.post("create_custom_loss", request)
        return f"{session}:loss:{number}" if answer is not None else None

    def send_pass(self, run: str, seq_id: int, data: list[Datum], loss_id: str | None = None) -> Any:
        """Submits a pass."""
        loss, config = ("custom", {"loss_id": loss_id}) if loss_id else ("cross_entropy", None)
        body = wire_proto.encode_forward_backward(ForwardBackwardRequest(run, seq_id, data, loss, config))
        return self.post("forward_backward", body, content_type=PROTO)


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """One node of a graph."""
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def graph(*steps: dict[str, Any]) -> list[dict[str, Any]]:
    """A loss that is the sum of the last step, which depends on the logprobs."""
    last = {"ref": steps[-1]["name"]}
    return [
        node("placeholder", "logprobs", "logprobs"),
        *steps,
        node("call_method", "total", "sum", last),
        node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]}),
    ]


def costly_loss(num_nodes: int = 1500) -> list[dict[str, Any]]:
    """A loss of many small steps."""
    return graph(
        *(
            node("call_function", f"n{n}", "torch.sin", {"ref": f"n{n - 1}" if n else "logprobs"})
            for n in range(num_nodes)
        )
    )


def crashing_loss(number: int) -> list[dict[str, Any]]:
    """A loss that divides the smallest integer by −1; every number gives another graph."""
    low, lowest, quotient = f"low{number}", f"lowest{number}", f"quotient{number}"
    return graph(
        node("call_function", low, "torch.full", [3], -(2**63) + 1),
        node("call_function", lowest, "operator.sub", {"ref": low}, 1),
        node("call_function", quotient, "torch.floor_divide", {"ref": lowest}, -1),
        node("call_function", "product", "operator.mul", {"ref": "logprobs"}, {"ref": quotient}),
    )


def datums(number: int, length: int) -> list[Datum]:
    """Datums of as many tokens each."""
    tokens = [5 + place % 50 for place in range(length + 1)]
    return [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}) for _ in range(number)]


# ---- behaviours: each yields after every attempt


def bombs(server: Server) -> Iterator[None]:
    """A few kilobytes that expand to millions of values."""
    items = b"{}," * NUM_ITEMS + b"{}"
    bodies = [
        (
            "telemetry",
            b'{"platform": "x", "sdk_version": "1", "session_id": "s", "events": [' + items + b"]}",
        ),
        ("create_custom_loss", b'{"session_id": "s", "graph": {"format": 1, "nodes": [' + items + b"]}}"),
        ("asample", b'{"prompt": {"chunks": [' + items + b"]}}"),
        ("forward", b'{"forward_input": {"data": [' + items + b"]}}"),
    ]
    packed = [(name, zstandard.compress(body)) for name, body in bodies]
    del bodies, items
    for name, body in itertools.cycle(packed):
        server.post(name, body, content_encoding="zstd")
        yield


def gaps(server: Server) -> Iterator[None]:
    """Passes that wait for a number that never arrives."""
    while True:
        made = server.run()
        if made is not None:
            for seq_id in range(2, 200):
                server.send_pass(made[1], seq_id, datums(8, 100))
                yield
        yield


def costly_losses(server: Server) -> Iterator[None]:
    """Passes of many one-token datums whose loss takes long, as many as are accepted."""
    while True:
        made = server.run()
        loss_id = server.upload(made[0], costly_loss()) if made is not None else None
        if made is not None and loss_id is not None:
            for seq_id in range(1, 500):
                server.send_pass(made[1], seq_id, datums(100 if seq_id % 2 else 5, 1), loss_id)
                yield
        yield


def crashing_losses(server: Server) -> Iterator[None]:
    """Passes whose loss would end the worker, each with another graph."""
    for number in itertools.count():
        made = server.run()
        loss_id = server.upload(made[0], crashing_loss(number)) if made is not None else None
        if made is not None and loss_id is not None:
            server.send_pass(made[1], 1, datums(1, 3), loss_id)
        yield


def abandoned_runs(server: Server) -> Iterator[None]:
    """Runs that nobody unloads, in sessions that nobody ends, with snapshots that nobody uses."""
    while True:
        made = server.run(rank=32)
        if made is not None:
            save = {"model_id": made[1], "seq_id": 1, "sampling_session_seq_id": 1}
            server.post("save_weights_for_sampler", {**save, "type": "save_weights_for_sampler"})
        yield


def stored_metadata(server: Server) -> Iterator[None]:
    """Sessions with as much metadata as is accepted."""
    for size in itertools.cycle((4_000_000, 50_000)):
        server.session(user_metadata={"note": "x" * size})
        yield


def idle_sockets(server: Server) -> Iterator[None]:
    """Connections without a request, or with half of one."""
    held: list[socket.socket] = []
    for number in itertools.count():
        try:
            connection = socket.create_connection(server.address, timeout=10, source_address=SOURCE)
            if number % 2:
                connection.sendall(b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\n")
            held.append(connection)
            server.statuses["opened"] += 1
        except OSError as error:
            server.statuses[type(error).__name__] += 1
        if len(held) > NUM_SOCKETS:
            with contextlib.suppress(OSError):
                held.pop(0).close()
        yield


def unread_replies(server: Server) -> Iterator[None]:
    """Searches whose replies nobody reads, many on each connection."""
    for _ in range(16):
        server.session(user_metadata={"note": "x" * 50_000})
        yield
    held: list[socket.socket] = []
    search = server.head("sessions/search", 2) + b"{}"
    while True:
        try:
            connection = socket.socket()
            connection.settimeout(10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.bind(SOURCE)
            connection.connect(server.address)
            connection.sendall(search * 20)
            held.append(connection)
            server.statuses["opened"] += 1
        except OSError as error:
            server.statuses[type(error).__name__] += 1
        if len(held) > NUM_UNREAD:
            with contextlib.suppress(OSError):
                held.pop(0).close()
        yield


BEHAVIOURS: Mapping[str, Callable[[Server], Iterator[None]]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        bombs,
        gaps,
        costly_losses,
        crashing_losses,
        abandoned_runs,
        stored_metadata,
        idle_sockets,
        unread_replies,
    )
}


def main(url: str, key: str, seconds: str, *names: str) -> None:
    """Runs the named behaviours for so many seconds, each on its own thread."""
    deadline = time.monotonic() + float(seconds)
    servers = {name: Server(url, key) for name in names}

    def behave(name: str) -> None:
        for _ in BEHAVIOURS[name](servers[name]):
            if time.monotonic() > deadline:
                return
            time.sleep(PAUSE_S)

    threads = [threading.Thread(target=behave, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()) + 60)
    print(json.dumps({name: dict(server.statuses) for name, server in servers.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
