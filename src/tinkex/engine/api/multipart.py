"""Forms with files (``multipart/form-data``), read piece by piece as they arrive."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from tinkex.errors import InvalidInput, TooLarge

LARGEST_HEAD = 16 * 1024
"""Bytes of the headers of one part."""
LARGEST_FIELD = 1024
MOST_PARTS = 128

_BOUNDARY = re.compile(r'\bboundary=(?:"([^"]+)"|([^\s;,"]+))', re.IGNORECASE)
_DISPOSITION = re.compile(
    r'form-data((?:\s*;\s*[a-z]+\*?=(?:"[^"]*"|[^\s;"]*))*)\s*', re.IGNORECASE | re.DOTALL
)
_PARAMETER = re.compile(r';\s*([a-z]+\*?)=(?:"([^"]*)"|([^\s;"]*))', re.IGNORECASE | re.DOTALL)


class Files(Protocol):
    """Who takes the files of a form; errors it raises end the reading."""

    def begin(self, name: str, content_type: str) -> None:
        """A file starts."""
        ...

    def write(self, data: bytes) -> None:
        """More of it."""
        ...

    def end(self) -> None:
        """It is over."""
        ...


@dataclass
class _Part:
    field: str
    is_file: bool
    text: bytearray


class FormReader:
    r"""Takes the body of a form in pieces of any size; files go to their taker, fields are in ``fields`` at the end.

    >>> class Print:
    ...     def begin(self, name, content_type): print("file", name, content_type)
    ...     def write(self, data): print(data)
    ...     def end(self): print("over")
    >>> reader = FormReader("multipart/form-data; boundary=x", Print())
    >>> reader.write(b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.png"\r\n\r\nPNG\r\n--x--\r\n')
    file a.png application/octet-stream
    b'PNG'
    over
    >>> reader.finish()
    """

    def __init__(self, content_type: str, files: Files) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        boundary = _BOUNDARY.search(content_type)
        if kind != "multipart/form-data" or boundary is None:
            raise InvalidInput(
                f"files come as multipart/form-data with a boundary, not as {content_type[:200]!r}."
            )
        self.fields: dict[str, str] = {}
        self._files = files
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
            raise _unreadable(error) from error

    def write(self, data: bytes) -> None:
        """Read on."""
        if self._complete:
            return  # what follows the last boundary means nothing
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _unreadable(error) from error

    def finish(self) -> None:
        """The body is over; :class:`InvalidInput` if the form is not."""
        if not self._complete:
            raise InvalidInput("the form breaks off before its last boundary; send it again, whole.")

    def _part_begins(self) -> None:
        self._num_parts += 1
        if self._num_parts > MOST_PARTS:
            raise TooLarge(f"a form has at most {MOST_PARTS} parts; send less at once.")
        self._headers = {}
        self._name.clear()
        self._value.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check_head()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_head()

    def _check_head(self) -> None:
        held = sum(len(name) + len(value) for name, value in self._headers.items())
        if held + len(self._name) + len(self._value) > LARGEST_HEAD:
            raise TooLarge(f"the headers of a part are longer than {LARGEST_HEAD} bytes.")

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
            raise InvalidInput(f"a part has no readable Content-Disposition: {disposition[:200]!r}.")
        given = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(read[1])}
        field, name = given.get("name"), given.get("filename")
        if field is None:
            raise InvalidInput("a part of the form has no name.")
        if self._headers.get("content-transfer-encoding", "binary").lower() not in {"binary", "8bit", "7bit"}:
            raise InvalidInput(f"{field!r} comes in a Content-Transfer-Encoding; send its bytes as they are.")
        if name is None and field in self.fields:
            raise InvalidInput(f"the field {field!r} comes twice.")
        self._part = _Part(field, name is not None, bytearray())
        if name is not None:
            self._files.begin(name, self._headers.get("content-type", "application/octet-stream"))

    def _content(self, data: bytes, start: int, end: int) -> None:
        assert self._part is not None
        if self._part.is_file:
            self._files.write(data[start:end])
        else:
            self._part.text += data[start:end]
            if len(self._part.text) > LARGEST_FIELD:
                raise TooLarge(f"the field {self._part.field!r} is longer than {LARGEST_FIELD} bytes.")

    def _part_ends(self) -> None:
        assert self._part is not None
        part, self._part = self._part, None
        if part.is_file:
            self._files.end()
        else:
            self.fields[part.field] = part.text.decode("utf-8", "replace")

    def _ends(self) -> None:
        self._complete = True


def _unreadable(error: FormParserError) -> InvalidInput:
    return InvalidInput(f"the form cannot be read: {error}.")
