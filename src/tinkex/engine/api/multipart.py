"""A streaming parser for ``multipart/form-data`` with files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from tinkex.errors import InvalidInput, TooLarge

MAX_PART_HEADER_BYTES = 16 * 1024
"""Limit for the headers of one part."""
MAX_FIELD_BYTES = 1024
MAX_PARTS = 128

_BOUNDARY = re.compile(r'\bboundary=(?:"([^"]+)"|([^\s;,"]+))', re.IGNORECASE)
_DISPOSITION = re.compile(
    r'form-data((?:\s*;\s*[a-z]+\*?=(?:"[^"]*"|[^\s;"]*))*)\s*', re.IGNORECASE | re.DOTALL
)
_PARAMETER = re.compile(r';\s*([a-z]+\*?)=(?:"([^"]*)"|([^\s;"]*))', re.IGNORECASE | re.DOTALL)


class FileSink(Protocol):
    """Receives the files of a form; an error it raises stops the parser."""

    def begin(self, name: str, content_type: str) -> None:
        """Start a file."""
        ...

    def write(self, data: bytes) -> None:
        """Add data to the current file."""
        ...

    def end(self) -> None:
        """Finish the current file."""
        ...


@dataclass
class _Part:
    field: str
    is_file: bool
    text: bytearray


class FormReader:
    r"""Parses the body of a form in chunks of any size; files go to the sink, other fields to ``fields``.

    >>> class Print:
    ...     def begin(self, name, content_type): print("file", name, content_type)
    ...     def write(self, data): print(data)
    ...     def end(self): print("end")
    >>> reader = FormReader("multipart/form-data; boundary=x", Print())
    >>> reader.write(b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.png"\r\n\r\nPNG\r\n--x--\r\n')
    file a.png application/octet-stream
    b'PNG'
    end
    >>> reader.finish()
    """

    def __init__(self, content_type: str, sink: FileSink) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        boundary = _BOUNDARY.search(content_type)
        if kind != "multipart/form-data" or boundary is None:
            raise InvalidInput(
                f"Content-Type is {content_type[:200]!r}; send files as multipart/form-data with a boundary."
            )
        self.fields: dict[str, str] = {}
        self._sink = sink
        self._num_parts = 0
        self._complete = False
        self._headers: dict[str, str] = {}
        self._name, self._value = bytearray(), bytearray()
        self._part: _Part | None = None
        try:
            self._parser = MultipartParser(
                (boundary[1] or boundary[2]).encode("latin-1", "replace"),
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._content_begins,
                    "on_part_data": self._content,
                    "on_part_end": self._part_ends,
                    "on_end": self._ends,
                },
            )
        except FormParserError as error:
            raise _invalid_form(error) from error

    def write(self, data: bytes) -> None:
        """Parse the next chunk."""
        if self._complete:
            return  # data after the last boundary is ignored, as RFC 2046 says
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid_form(error) from error

    def finish(self) -> None:
        """Check at the end of the body that the form is complete; raises :class:`InvalidInput` if it is not."""
        if not self._complete:
            raise InvalidInput("the form ends before its last boundary; send it again.")

    def _part_begins(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise TooLarge(f"a form has at most {MAX_PARTS} parts; send fewer per request.")
        self._headers = {}
        self._name.clear()
        self._value.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check_headers()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_headers()

    def _check_headers(self) -> None:
        size = sum(len(name) + len(value) for name, value in self._headers.items())
        if size + len(self._name) + len(self._value) > MAX_PART_HEADER_BYTES:
            raise TooLarge(f"the headers of a part are longer than {MAX_PART_HEADER_BYTES} bytes.")

    def _header_ends(self) -> None:
        self._headers[self._name.decode("latin-1").strip().lower()] = self._value.decode(
            "utf-8", "replace"
        ).strip()
        self._name.clear()
        self._value.clear()

    def _content_begins(self) -> None:
        disposition = self._headers.get("content-disposition", "")
        read = _DISPOSITION.fullmatch(disposition)
        if read is None:
            raise InvalidInput(f"a part has an invalid Content-Disposition: {disposition[:200]!r}.")
        given = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(read[1])}
        field, name = given.get("name"), given.get("filename")
        if field is None:
            raise InvalidInput("a part of the form has no name.")
        if self._headers.get("content-transfer-encoding", "binary").lower() not in {"binary", "8bit", "7bit"}:
            raise InvalidInput(
                f"{field!r} has a Content-Transfer-Encoding, which is not supported; send its raw bytes."
            )
        if name is None and field in self.fields:
            raise InvalidInput(f"the field {field!r} is repeated.")
        self._part = _Part(field, name is not None, bytearray())
        if name is not None:
            self._sink.begin(name, self._headers.get("content-type", "application/octet-stream"))

    def _content(self, data: bytes, start: int, end: int) -> None:
        assert self._part is not None
        if self._part.is_file:
            self._sink.write(data[start:end])
        else:
            self._part.text += data[start:end]
            if len(self._part.text) > MAX_FIELD_BYTES:
                raise TooLarge(f"the field {self._part.field!r} is longer than {MAX_FIELD_BYTES} bytes.")

    def _part_ends(self) -> None:
        assert self._part is not None
        part, self._part = self._part, None
        if part.is_file:
            self._sink.end()
        else:
            self.fields[part.field] = part.text.decode("utf-8", "replace")

    def _ends(self) -> None:
        self._complete = True


def _invalid_form(error: FormParserError) -> InvalidInput:
    return InvalidInput(f"the form is invalid: {error}.")
