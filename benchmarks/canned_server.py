"""A server that responds immediately with canned results, so that a benchmark measures only the client.

    python benchmarks/canned_server.py [--retrieve-futures] [--hold SECONDS] [--tls CERTIFICATE KEY]

Prints its port. It implements just enough of the protocol for both clients: it accepts every submission, and the
result is ready immediately. The options enable optional features of servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import uvloop

from tinkex import types
from tinkex._wire import proto
from tinkex._wire import tinkex_wire_pb2 as pb

NUM_SAMPLED = 64
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")
_CHUNKED = re.compile(rb"(?i)transfer-encoding: *chunked")


def sample_body() -> bytes:
    """Returns one sequence of 64 tokens with logprobs."""
    tokens = np.arange(1000, 1000 + NUM_SAMPLED, dtype=np.int32)
    logprobs = -np.linspace(0.01, 3.0, NUM_SAMPLED, dtype=np.float32)
    return proto.encode_sample_response(
        types.SampleResponse([types.SampledSequence("length", "", tokens, logprobs)])
    )


def pass_body(num_datums: int, num_tokens: int) -> bytes:
    """Returns the logprobs of every token of a batch."""
    logprobs = types.TensorData.from_numpy(-np.ones(num_tokens, np.float32))
    return proto.encode_forward_backward_output(
        types.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[{"logprobs": logprobs}] * num_datums,
            metrics={"loss:sum": 1.0},
        )
    )


class Responses:
    """The canned responses, shared by all connections."""

    def __init__(self, options: argparse.Namespace) -> None:
        features: dict[str, Any] = {"sample_use_retrieve_futures": True} if options.retrieve_futures else {}
        self.hold_s = float(options.hold)
        if self.hold_s:
            features["sample_max_concurrent_requests"] = 10_000
        self.config = json.dumps(features)
        self.batched_polls = bool(options.retrieve_futures)
        self.accepted = 0
        self.due: dict[bytes, float] = {}
        self.sample = sample_body()
        self.passed: dict[int, bytes] = {}
        self.sizes: dict[bytes, int] = {}
        self.finished: list[str] = []
        self.waiting: list[Callable[[], None]] = []

    def respond(self, path: bytes, body: bytes) -> tuple[bytes, bytes] | None:
        """Returns content type and body of the response; None if it is not ready."""
        if path == b"/api/v1/retrieve_future":
            return self._result(body)
        if path == b"/api/v1/asample":
            self.accepted += 1
            name = f"s{self.accepted}"
            if self.hold_s:
                self.due[name.encode()] = time.monotonic() + self.hold_s
            if self.batched_polls:
                self.finished.append(name)
                waiting, self.waiting = self.waiting, []
                for wake in waiting:
                    wake()
            return _JSON, b'{"request_id":"%b","sample_sequence_ids":["%b:0"]}' % ((name.encode(),) * 2)
        if path == b"/api/v1/forward_backward":
            self.accepted += 1
            message = pb.ForwardBackwardRequest.FromString(body)
            size = len(message.data)
            name_bytes = b"f%d" % self.accepted
            self.sizes[name_bytes] = size
            if size not in self.passed:
                chunk = message.data[0].model_input[0].encoded_text.tokens
                self.passed[size] = pass_body(size, len(chunk) // 4)
            return _JSON, b'{"request_id":"%b"}' % name_bytes
        if path == b"/api/v1/create_sampling_session":
            self.finished.clear()  # only one client is measured at a time
        plain = _PLAIN.get(path)
        if plain is not None:
            return _JSON, plain
        if path == b"/api/v1/client/config":
            return _JSON, self.config.encode()
        return _JSON, b"{}"

    def wait_s(self, path: bytes, body: bytes) -> float:
        """Returns how long a poll waits for its result."""
        if not self.due or path != b"/api/v1/retrieve_future":
            return 0.0
        return self.due.get(_name(body), 0.0) - time.monotonic()

    def _result(self, body: bytes) -> tuple[bytes, bytes]:
        name = _name(body)
        if name[:1] == b"s":
            return _PROTO, self.sample
        if name[:1] == b"f":
            return _PROTO, self.passed[self.sizes[name]]
        return _JSON, _RESULTS[name]

    def completions(self, body: bytes) -> tuple[bytes, bytes] | None:
        """Returns the response to retrieve_futures; None if nothing has finished since the cursor."""
        cursor = int(json.loads(body)["prev_cursor"])
        if cursor >= len(self.finished):
            return None
        done = [
            {"state": "finished", "request_id": n, "response_payload_uncompressed_size": len(self.sample)}
            for n in self.finished[cursor:]
        ]
        return _JSON, json.dumps({"completions": done, "cursor": len(self.finished)}).encode()


def _name(body: bytes) -> bytes:
    start = body.index(b'"request_id"') + 12
    start = body.index(b'"', start) + 1
    return body[start : body.index(b'"', start)]


_JSON, _PROTO = b"application/json", b"application/x-protobuf"
_PLAIN = {
    b"/api/v1/create_session": b'{"session_id":"bench"}',
    b"/api/v1/create_sampling_session": b'{"sampling_session_id":"bench:sample:0"}',
    b"/api/v1/create_model": b'{"request_id":"m"}',
    b"/api/v1/optim_step": b'{"request_id":"o"}',
    b"/api/v1/telemetry": b'{"status":"accepted"}',
    b"/api/v1/get_server_capabilities": b'{"supported_models":[]}',
}
_RESULTS = {b"m": b'{"model_id":"bench:train:0"}', b"o": b'{"metrics":{"norm":1.0}}'}


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._buffer = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(buffer[:end])
            found = _LENGTH.search(head)
            if found is None and _CHUNKED.search(head):
                stop = buffer.find(b"\r\n0\r\n\r\n", end)
                if stop < 0:
                    return
                body, taken = _decode_chunked(bytes(buffer[end + 4 : stop + 2])), stop + 7
            else:
                taken = end + 4 + (int(found[1]) if found else 0)
                if len(buffer) < taken:
                    return
                body = bytes(buffer[end + 4 : taken])
            del buffer[:taken]
            self._respond(head.split(b" ", 2)[1], body)

    def _respond(self, path: bytes, body: bytes) -> None:
        if self._transport.is_closing():
            return  # the client has disconnected
        wait_s = self._responses.wait_s(path, body)
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._respond, path, body)
            return
        if path == b"/api/v1/retrieve_futures":
            response = self._responses.completions(body)
            if response is None:
                self._responses.waiting.append(lambda: self._respond(path, body))
                return
        else:
            response = self._responses.respond(path, body)
        assert response is not None
        kind, text = response
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(text), text)
        )


def _decode_chunked(data: bytes) -> bytes:
    out = bytearray()
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        out += rest[:length]
        data = rest[length + 2 :]
    return bytes(out)


async def serve(options: argparse.Namespace) -> None:
    responses = Responses(options)
    loop = asyncio.get_running_loop()
    context = None
    if options.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*options.tls)
        context.set_alpn_protocols(["http/1.1"])
    server = await loop.create_server(
        lambda: Connection(responses), "127.0.0.1", 0, backlog=4096, ssl=context
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.connect_read_pipe(lambda: _UntilEof(loop), sys.stdin)
    await server.serve_forever()


class _UntilEof(asyncio.Protocol):
    """Stops the server when the benchmark that started it exits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def connection_lost(self, _: Exception | None) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--retrieve-futures", action="store_true", help="enable batched polls")
    parser.add_argument(
        "--hold", type=float, default=0.0, help="duration of a sample in seconds, with any number in flight"
    )
    parser.add_argument(
        "--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="speak HTTPS with these PEM files"
    )
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
