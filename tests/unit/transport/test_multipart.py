"""Files on their way to a server: every form they can be given in, every transport, and what can go wrong."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import date
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_multipart.multipart import MultipartParser

from tests.unit.transport.loopback import Seen
from tinkex._transport.base import Reply, Request
from tinkex._transport.caller import Caller
from tinkex._transport.http import HttpTransport
from tinkex._transport.local_stream import LocalStream
from tinkex._transport.multipart import FileForm, FileForms, Form, escaped, form_fields
from tinkex._transport.retry import RetryPolicy
from tinkex._transport.sources import CHUNK_BYTES
from tinkex._transport.streaming import open_stream, send_upload
from tinkex._wire.endpoints import endpoint
from tinkex.config import Config
from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    HttpRequest,
    InsufficientStorageError,
    InternalServerError,
    PayloadTooLargeError,
    UploadError,
)
from tinkex.testing import MockTransport, reply

Part = tuple[dict[str, str], bytes]


def parse(body: bytes, content_type: str) -> list[Part]:
    """The parts of a body, read by a library that is not ours."""
    parts: list[tuple[dict[str, str], bytearray]] = []
    name, value = bytearray(), bytearray()

    def header_ends() -> None:
        parts[-1][0][name.decode().lower()] = value.decode()
        name.clear()
        value.clear()

    ended: list[bool] = []
    parser = MultipartParser(
        content_type.partition("boundary=")[2],
        {
            "on_part_begin": lambda: parts.append(({}, bytearray())),
            "on_header_field": lambda data, start, end: name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: value.extend(data[start:end]),
            "on_header_end": header_ends,
            "on_part_data": lambda data, start, end: parts[-1][1].extend(data[start:end]),
            "on_end": lambda: ended.append(True),
        },
    )
    parser.write(body)
    parser.finalize()
    assert ended == [True]
    return [(headers, bytes(content)) for headers, content in parts]


async def collect(form: Form) -> bytes:
    reading = form.read()
    try:
        return b"".join([piece async for piece in reading])
    finally:
        reading.close()


def at_once(form: Form) -> Any:
    """The body of a form whose files are all in memory: nothing in it waits."""
    with pytest.raises(StopIteration) as over:
        collect(form).send(None)
    return over.value.value


def sent(files: FileForms, fields: Mapping[str, str] | None = None) -> list[Part]:
    form = Form(fields or {}, files)
    body = asyncio.run(collect(form))
    assert form.length in {None, len(body)}
    return parse(body, form.content_type)


class Pipe:
    """A file object that can be read once, such as a socket."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def read(self, size: int) -> bytes:
        return self._content.read(size)


def forms(content: bytes, folder: Path) -> dict[str, tuple[FileForm, str, str]]:
    """Every form a file can be given in, with the name and type it goes under."""
    path = folder / "cat.png"
    path.write_bytes(content)
    named = io.BytesIO(content)
    named.name = "/somewhere/dog.jpeg"
    return {
        "bytes": (content, "file", "application/octet-stream"),
        "bytearray": (bytearray(content), "file", "application/octet-stream"),
        "memoryview": (memoryview(content), "file", "application/octet-stream"),
        "path": (path, "cat.png", "image/png"),
        "file object": (io.BytesIO(content), "file", "application/octet-stream"),
        "named file object": (named, "dog.jpeg", "image/jpeg"),
        "pipe": (Pipe(content), "file", "application/octet-stream"),
        "name and bytes": (("a.png", content), "a.png", "image/png"),
        "no name and path": ((None, path), "cat.png", "image/png"),
        "with type": (("a", content, "image/jpeg"), "a", "image/jpeg"),
        "with headers": (("a", path, None, {"X-Side": "left"}), "a", "application/octet-stream"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1])
def test_a_file_arrives_whatever_form_it_is_given_in(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    for form, name, kind in forms(content, tmp_path).values():
        [(headers, arrived)] = sent([form])
        assert arrived == content
        assert headers["content-disposition"] == f'form-data; name="file"; filename="{name}"'
        assert headers["content-type"] == kind


def test_fields_files_by_name_and_headers_go_out_in_order(tmp_path: Path) -> None:
    path = tmp_path / "b.png"
    path.write_bytes(b"B")
    parts = sent({"left": b"A", "right": ("c", path, None, {"X-Side": "r"})}, {"ttl_seconds": "60"})
    assert [content for _, content in parts] == [b"60", b"A", b"B"]
    assert [headers["content-disposition"] for headers, _ in parts] == [
        'form-data; name="ttl_seconds"',
        'form-data; name="left"; filename="left"',
        'form-data; name="right"; filename="c"',
    ]
    assert parts[2][0]["x-side"] == "r"


def test_files_of_a_list_may_name_their_fields_and_share_one() -> None:
    parts = sent([("page", ("1.txt", b"A")), ("page", ("2.txt", b"B", "text/plain")), ("c", b"C")])
    assert [content for _, content in parts] == [b"A", b"B", b"C"]
    assert [headers["content-disposition"] for headers, _ in parts] == [
        'form-data; name="page"; filename="1.txt"',
        'form-data; name="page"; filename="2.txt"',
        'form-data; name="file"; filename="c"',
    ]


@given(name=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), content=st.binary())
def test_names_and_contents_arrive_as_they_were(name: str, content: bytes) -> None:
    form = Form({}, {name: (name, content)})
    [(headers, arrived)] = parse(at_once(form), form.content_type)
    assert arrived == content
    shown = name.replace('"', "%22")
    assert headers["content-disposition"] == f'form-data; name="{shown}"; filename="{shown}"'


@given(name=st.text(min_size=1))
def test_no_name_can_end_its_header(name: str) -> None:
    form = Form({}, {name: (name, b"content")}, boundary="b")
    head = at_once(form).partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert len(head) == 3, "the boundary, the disposition and the type"
    assert head[1].count(b'"') == 4
    assert b"\r" not in head[1] + head[2]
    assert b"\n" not in head[1] + head[2]
    assert not set(escaped(name)) & set('"\r\n')


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("cat.png", "a str is ambiguous"),
        (("a", "text/with/slashes"), "a str is ambiguous"),
        (3, "int is not a file"),
        ((b"a", b"b"), "the name of a file is a str"),
        (("a",), "(name, content"),
        (io.StringIO("text"), "open in text mode"),
        (Path("/nowhere/at/all.png"), "/nowhere/at/all.png cannot be read"),
        (Path("/"), "not a regular file"),
        ((3, ("a", b"")), "the field of a file is a str, not int"),
        (("a", b"", "image/png\r\nX-Evil: 1"), "not a content type"),
        (("a", b"", None, {"X-Evil\r\nX": "1"}), "not a valid header"),
        (("a", b"", None, {"X": "1\r\nY: 2"}), "not a valid header"),
        (("a", b"", None, {"Content-Type": "x"}), "is set from the name"),
    ],
)
def test_what_is_not_a_file_is_rejected_before_anything_is_sent(form: Any, said: str) -> None:
    with pytest.raises(UploadError, match=said.replace("(", r"\(")):
        Form({}, [form])


@pytest.mark.parametrize("files", [[], {}, b"one", Path("one"), "one", 3], ids=repr)
def test_several_files_are_a_list_or_a_mapping(files: Any) -> None:
    with pytest.raises(UploadError):
        Form({}, files)


def test_a_file_object_is_read_from_where_it_stands_again_and_again_and_stays_open() -> None:
    file = io.BytesIO(b"skipped|kept")
    file.seek(8)
    form = Form({}, [file])
    assert form.repeatable
    assert [parse(asyncio.run(collect(form)), form.content_type)[0][1] for _ in range(2)] == [b"kept"] * 2
    assert not file.closed


def test_a_pipe_is_read_only_once() -> None:
    form = Form({}, [("p", Pipe(b"once"))])
    assert form.length is None
    before = form.repeatable
    asyncio.run(collect(form))
    assert (before, form.repeatable) == (True, False), "once something was read"
    with pytest.raises(UploadError, match="was already read and cannot be rewound"):
        asyncio.run(collect(form))


def test_a_file_that_is_truncated_or_removed_is_an_error_and_one_that_grows_is_sent_as_it_was(
    tmp_path: Path,
) -> None:
    path = tmp_path / "moving"
    path.write_bytes(b"12345")
    form = Form({}, [path])
    path.write_bytes(b"1234567")
    assert parse(asyncio.run(collect(form)), form.content_type)[0][1] == b"12345"
    path.write_bytes(b"1")
    with pytest.raises(UploadError, match="was truncated"):
        asyncio.run(collect(form))
    path.unlink()
    with pytest.raises(UploadError, match="cannot be read"):
        asyncio.run(collect(form))


class Measured(io.RawIOBase):
    """A large file that is made while it is read, and knows how it was."""

    def __init__(self, size: int, *, seekable: bool = True) -> None:
        self.size, self.at, self.largest, self.is_seekable = size, 0, 0, seekable

    def seekable(self) -> bool:
        return self.is_seekable

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset if whence == 0 else self.size + offset
        return self.at

    def read(self, size: int = -1) -> bytes:
        assert size >= 0
        self.largest = max(self.largest, size)
        count = min(size, self.size - self.at)
        self.at += count
        return bytes(count)


@asynccontextmanager
async def receiving(
    speak: Callable[[Seen, asyncio.StreamReader, asyncio.StreamWriter], Any],
) -> AsyncIterator[str]:
    """A server that gets the head of a request and the connection."""

    tasks: set[asyncio.Task[None]] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip().split("\r\n")
            headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
            await speak(Seen("POST", first, headers, b""), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(converse(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def whole_body(seen: Seen, reader: asyncio.StreamReader) -> bytes:
    if "content-length" in seen.headers:
        return await reader.readexactly(int(seen.headers["content-length"]))
    body = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return bytes(body)


async def answer(writer: asyncio.StreamWriter, status: int, body: bytes = b"{}") -> None:
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
    await writer.drain()


ROUTES = ["plain", "library"]
"""Straight over a socket, and by the library that does TLS and proxies: there the server of the test is the proxy."""


def request_of(form: Form, timeout: float = 30.0) -> Request:
    headers = {"content-type": form.content_type, "accept-encoding": "identity"}
    return Request("POST", "/api/v1/assets", headers, timeout=timeout, upload=form)


async def send_over(route: str, url: str, form: Form, timeout: float = 30.0) -> Any:
    config = Config(base_url=url, api_key="tml-x")
    if route == "library":
        config = Config(base_url="http://behind.the.proxy", proxy=url, api_key="tml-x")
    transport = HttpTransport(config)
    try:
        return await send_upload(transport, request_of(form, timeout))
    finally:
        await transport.close()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("known", [True, False])
async def test_files_arrive_over_a_socket_with_their_length_where_it_is_known(
    route: str, known: bool, tmp_path: Path
) -> None:
    content = os.urandom(3 * CHUNK_BYTES + 5)
    path = tmp_path / "large.png"
    path.write_bytes(content)
    arrived: list[Part] = []
    heads: list[dict[str, str]] = []

    async def speak(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(seen.headers)
        arrived.extend(parse(await whole_body(seen, reader), seen.headers["content-type"]))
        await answer(writer, 200, b'{"ok":1}')

    async with receiving(speak) as url:
        form = Form({}, [path if known else ("large.png", Pipe(content))])
        got = await send_over(route, url, form)
    assert (got.status, got.body) == (200, b'{"ok":1}')
    assert arrived[0][1] == content
    assert heads[0].get("content-length") == (str(form.length) if known else None)
    assert heads[0].get("transfer-encoding") == (None if known else "chunked")


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
async def test_a_file_is_read_in_chunks_as_the_server_receives_it(route: str) -> None:
    """A server that takes a little and then no more stops the reading: nothing gathers in between."""
    file = Measured(1024 * CHUNK_BYTES)
    taken = asyncio.Event()

    async def speak(_: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2 * CHUNK_BYTES)
        taken.set()
        await asyncio.Event().wait()

    async with receiving(speak) as url:
        sending = asyncio.ensure_future(send_over(route, url, Form({}, [("m", file)])))
        await taken.wait()
        at = -1
        while at != file.at:  # until the buffers on the way are full
            at = file.at
            await asyncio.sleep(0.05)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert file.largest == CHUNK_BYTES
    assert 2 * CHUNK_BYTES <= file.at < file.size, "it was read to its end though nobody took it"


@pytest.mark.parametrize("route", ROUTES)
async def test_an_early_rejection_is_returned_and_stops_the_upload(route: str) -> None:
    file = Measured(4096 * CHUNK_BYTES)

    async def speak(_: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1000)
        await answer(writer, 413, b'{"detail":"too large"}')
        await asyncio.Event().wait()

    async with receiving(speak) as url:
        got = await send_over(route, url, Form({}, [("m", file)]))
    assert (got.status, got.body) == (413, b'{"detail":"too large"}')
    assert file.at < file.size


async def test_a_rejection_whose_body_is_lost_is_still_a_rejection() -> None:
    async def speak(_: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 X\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        await reader.readexactly(1000)
        writer.transport.abort()

    async with receiving(speak) as url:
        got = await send_over("plain", url, Form({}, [("m", Measured(64 * CHUNK_BYTES))]))
    assert got.status == 413


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
async def test_a_connection_that_breaks_and_one_that_stands_still_are_typed_errors(route: str) -> None:
    async def hang_up(_: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1000)
        writer.transport.abort()

    async def stand_still(_: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with receiving(hang_up) as url:
        with pytest.raises(APIConnectionError):
            await send_over(route, url, Form({}, [("m", Measured(64 * CHUNK_BYTES))]))
    async with receiving(stand_still) as url:
        with pytest.raises(APITimeoutError):
            await send_over(route, url, Form({}, [("m", Measured(64 * CHUNK_BYTES))]), timeout=0.2)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_file_that_cannot_be_read_is_an_upload_error_and_not_a_connection_error(
    route: str, tmp_path: Path
) -> None:
    path = tmp_path / "shrinks"
    path.write_bytes(bytes(4 * CHUNK_BYTES))
    form = Form({}, [path])
    path.write_bytes(bytes(CHUNK_BYTES))

    async def speak(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_body(seen, reader)

    async with receiving(speak) as url:
        with pytest.raises(UploadError, match="was truncated"):
            await send_over(route, url, form)


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock a test moves on."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


def test_a_slow_upload_that_makes_progress_does_not_time_out() -> None:
    """The timeout bounds each wait for progress, not the whole."""

    class Slow(Measured):
        def read(self, size: int = -1) -> bytes:
            loop.skipped += 40.0
            return super().read(min(size, 1000))

    async def speak(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_body(seen, reader)
        await answer(writer, 200)

    async def send() -> int:
        async with receiving(speak) as url:
            form = Form({}, [("m", Slow(20_000))])
            status: int = (await send_over("plain", url, form, timeout=60.0)).status
            return status

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        loop = cast("SkippingLoop", runner.get_loop())
        assert runner.run(send()) == 200
    assert loop.skipped >= 800, "it took much longer than the timeout"


async def test_an_application_in_this_process_receives_every_chunk() -> None:
    file = Measured(100 * CHUNK_BYTES, seekable=False)
    ahead: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got = 0
        while (message := await receive())["more_body"]:
            assert len(message["body"]) <= CHUNK_BYTES
            got += len(message["body"])
            ahead.append(file.at - got)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    form = Form({}, [("m", file)])
    stream = await LocalStream.open(app, {}, form, HttpRequest("POST", "local:/"), 30.0)
    assert await stream.read() == b"{}"
    await stream.close()
    assert file.at == file.size
    assert max(ahead) <= 0, "something was read before it was asked for"
    assert file.largest <= CHUNK_BYTES


async def test_an_application_sees_a_file_that_cannot_be_read_as_a_caller_who_hung_up() -> None:
    pipe = Form({}, [("p", Pipe(b"x"))])
    await collect(pipe)
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            pass
        seen.append(message["type"])

    with pytest.raises(UploadError, match="cannot be rewound"):
        await LocalStream.open(app, {}, pipe, HttpRequest("POST", "local:/"), 30.0)
    assert seen == ["http.disconnect"]


UPLOAD = endpoint("upload_assets")
MADE = reply({"assets": []})


class Failing:
    """A server that fails a few times, before or after it has read the body."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self._answers = list(answers)
        self.bodies: list[bytes] = []

    async def send(self, request: Request) -> Reply:
        raise AssertionError("files go as streams")

    async def stream(self, request: Request) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):  # nothing of the body was asked for
            raise APIConnectionError(None, str(answer))
        assert request.upload is not None
        reading = request.upload.read()
        self.bodies.append(b"".join([piece async for piece in reading]))
        reading.close()
        if isinstance(answer, Exception):
            raise answer
        return await open_stream(MockTransport(lambda _: answer), Request("POST", request.path))

    async def close(self) -> None:
        pass


def caller_over(transport: Any) -> Caller:
    policy = RetryPolicy(base_s=0.001, cap_s=0.002)
    return Caller(transport, Config(base_url="http://mock", api_key="tml-x"), policy=policy)


@pytest.mark.parametrize("failure", [reply({}, 503), APIConnectionError(None, "cut"), OSError("refused")])
async def test_an_upload_that_failed_is_sent_again_whole(failure: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"whole")
    server = Failing(failure, MADE)
    form = Form({}, [path, io.BytesIO(b"rewound")])
    await caller_over(server).call(UPLOAD, upload=form)
    for body in server.bodies:
        assert [content for _, content in parse(body, form.content_type)] == [b"whole", b"rewound"]
    assert len(server.bodies) == (1 if isinstance(failure, OSError) else 2)


async def test_a_pipe_is_sent_again_only_while_nothing_of_it_was_read() -> None:
    untouched = Failing(OSError("refused"), MADE)
    await caller_over(untouched).call(UPLOAD, upload=Form({}, [("p", Pipe(b"x"))]))
    assert len(untouched.bodies) == 1
    half_way = Failing(reply({"detail": "down"}, 503), MADE)
    with pytest.raises(InternalServerError, match="down") as rejected:
        await caller_over(half_way).call(UPLOAD, upload=Form({}, [("p", Pipe(b"x"))]))
    assert "cannot be rewound" in "".join(rejected.value.__notes__)
    assert len(half_way.bodies) == 1


@pytest.mark.parametrize(("status", "kind"), [(413, PayloadTooLargeError), (507, InsufficientStorageError)])
async def test_a_file_there_is_no_room_for_is_a_typed_error_and_is_not_sent_again(
    status: int, kind: type[Exception]
) -> None:
    server = Failing(reply({"detail": "no room"}, status), MADE)
    with pytest.raises(kind, match="no room"):
        await caller_over(server).call(UPLOAD, upload=Form({}, [b"content"]))
    assert len(server.bodies) == 1


async def test_a_transport_that_cannot_stream_gets_the_whole_body() -> None:
    form = Form({"a": "b"}, [b"content"])
    transport = MockTransport(lambda _: reply({"fine": True}))
    got = await send_upload(transport, request_of(form))
    assert got.status == 200
    assert [content for _, content in parse(transport.requests[0].body, form.content_type)] == [
        b"b",
        b"content",
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"a": "x", "b": 1, "c": 1.5}, [("a", "x"), ("b", "1"), ("c", "1.5")]),
        ({"a": {"b": {"c": "x"}}}, [("a[b][c]", "x")]),
        ({"a": ["x", "y"], "b": ("z",)}, [("a[]", "x"), ("a[]", "y"), ("b[]", "z")]),
        ({"a": [{"b": 1}, {"b": 2}]}, [("a[][b]", "1"), ("a[][b]", "2")]),
        ({"a": None, "b": True, "c": False}, [("a", ""), ("b", "true"), ("c", "false")]),
        ({"a": date(2030, 1, 2)}, [("a", "2030-01-02")]),
        ({"a": {}, "b": []}, []),
    ],
)
def test_nested_fields_have_names_with_brackets(
    fields: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert form_fields(fields) == expected


def test_the_error_for_a_field_that_is_not_plain_names_it() -> None:
    with pytest.raises(UploadError, match=r"'a\[b\]' is a bytes"):
        form_fields({"a": {"b": b"x"}})
