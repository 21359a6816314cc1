"""Parsing multipart forms, in chunks of any size and with invalid content."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex._transport.multipart import Form
from tinkex.engine.api.multipart import MAX_FIELD_BYTES, MAX_PART_HEADER_BYTES, MAX_PARTS, FormReader
from tinkex.errors import InvalidInput, TooLarge

BOUNDARY = "multipart/form-data; boundary=x"


@dataclass
class MemorySink:
    """Collects the files."""

    files: list[tuple[str, str, bytearray]] = field(default_factory=list)
    ended: int = 0

    def begin(self, name: str, content_type: str) -> None:
        self.files.append((name, content_type, bytearray()))

    def write(self, data: bytes) -> None:
        self.files[-1][2].extend(data)

    def end(self) -> None:
        self.ended += 1


def body_of(form: Form) -> Any:
    async def collect() -> bytes:
        return b"".join([piece async for piece in form.read()])

    with pytest.raises(StopIteration) as over:
        collect().send(None)  # no I/O, so it never suspends
    return over.value.value


def read(body: bytes, content_type: str = BOUNDARY, step: int = 1 << 20) -> tuple[MemorySink, dict[str, str]]:
    sink = MemorySink()
    reader = FormReader(content_type, sink)
    for start in range(0, len(body), step):
        reader.write(body[start : start + step])
    reader.finish()
    assert sink.ended == len(sink.files)
    return sink, reader.fields


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40)


@given(
    files=st.lists(st.tuples(NAMES, st.binary(max_size=300)), min_size=1, max_size=4),
    fields=st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"]), max_size=50), max_size=2),
    step=st.integers(1, 400),
)
def test_forms_of_our_client_are_parsed_in_chunks_of_any_size(
    files: list[tuple[str, bytes]], fields: dict[str, str], step: int
) -> None:
    form = Form(fields, list(files))
    sink, got = read(body_of(form), form.content_type, step)
    assert got == {name.replace('"', "%22"): text for name, text in fields.items()}
    assert [(name, bytes(content)) for name, _, content in sink.files] == [
        (name.replace('"', "%22"), content) for name, content in files
    ]


PARTS = st.sampled_from(
    [
        b"--x\r\n",
        b"--x--\r\n",
        b"--x--",
        b"\r\n",
        b'Content-Disposition: form-data; name="f"; filename="a"\r\n',
        b'Content-Disposition: form-data; name="f"\r\n',
        b"Content-Disposition: attachment\r\n",
        b"Content-Type: image/png\r\n",
        b"content",
        b"\x00\xff",
        b"--",
        b": \r\n",
    ]
)


@given(pieces=st.lists(PARTS | st.binary(max_size=20), max_size=12), step=st.integers(1, 50))
def test_random_bytes_are_parsed_or_rejected_with_an_error(pieces: list[bytes], step: int) -> None:
    with suppress(InvalidInput, TooLarge):
        read(b"".join(pieces), step=step)


def part(head: str, content: bytes = b"content") -> bytes:
    return b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"


END = b"--x--\r\n"
FILE = 'Content-Disposition: form-data; name="f"; filename="a.png"'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ends before its last boundary"),
        (part(FILE), "ends before its last boundary"),
        (part(FILE)[:40], "ends before its last boundary"),
        (b"no boundary at all", "is invalid"),
        (part("X: y") + END, "invalid Content-Disposition"),
        (part("Content-Disposition: attachment; name=a") + END, "invalid Content-Disposition"),
        (part('Content-Disposition: form-data; filename="a"') + END, "has no name"),
        (part('Content-Disposition: form-data; name="a') + END, "invalid Content-Disposition"),
        (part('Content-Disposition: form-data; name="a"') * 2 + END, "is repeated"),
        (part(f"{FILE}\r\nContent-Transfer-Encoding: base64") + END, "Transfer-Encoding"),
    ],
    ids=range(10),
)
def test_invalid_forms_are_rejected_with_a_reason(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(body)


@pytest.mark.parametrize(
    "body",
    [
        part(f"{FILE}\r\nX-Long: {'y' * MAX_PART_HEADER_BYTES}") + END,
        part(FILE + "".join(f"\r\nX-{n}: {'y' * 900}" for n in range(30))) + END,
        part('Content-Disposition: form-data; name="a"', bytes(MAX_FIELD_BYTES + 1)) + END,
        part(FILE) * (MAX_PARTS + 1) + END,
    ],
    ids=["a header", "many headers", "a field", "many parts"],
)
@pytest.mark.parametrize("step", [100, 1 << 20])
def test_forms_above_the_limits_are_rejected(body: bytes, step: int) -> None:
    with pytest.raises((TooLarge, InvalidInput)):
        read(body, step=step)


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x", f"{BOUNDARY}{'y' * 1000}"],
)
def test_other_content_types_are_rejected(content_type: str) -> None:
    with pytest.raises(InvalidInput):
        read(part(FILE) + END, content_type)


def test_other_spellings_are_parsed_and_the_epilogue_is_ignored() -> None:
    head = "content-disposition:form-data;name=f; filename=plain.png\r\ncontent-type: image/png"
    sink, _ = read(
        part(head) + END + b"an epilogue\r\n--x\r\n", 'Multipart/Form-Data; charset=a; boundary="x"'
    )
    assert [(name, kind, bytes(content)) for name, kind, content in sink.files] == [
        ("plain.png", "image/png", b"content")
    ]


def test_an_error_of_the_sink_is_raised() -> None:
    class Full(MemorySink):
        def write(self, data: bytes) -> None:
            raise TooLarge("no more")

    reader = FormReader(BOUNDARY, Full())
    with pytest.raises(TooLarge, match="no more"):
        reader.write(part(FILE))


def test_file_contents_are_passed_on_in_chunks() -> None:
    """Only the current chunk of a file is held in memory."""
    largest = 0

    class Measure(MemorySink):
        def write(self, data: bytes) -> None:
            nonlocal largest
            largest = max(largest, len(data))

    reader: Any = FormReader(BOUNDARY, Measure())
    reader.write(b"--x\r\n" + FILE.encode() + b"\r\n\r\n")
    for _ in range(200):
        reader.write(bytes(1000))
    reader.write(b"\r\n" + END)
    reader.finish()
    assert largest <= 1000
