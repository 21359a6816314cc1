"""Files as the body of a request (``multipart/form-data``, RFC 7578), read while they are sent.

Names go out as browsers write them: in UTF-8, with ``"``, CR and LF as ``%22``, ``%0D`` and ``%0A``, so that no name
can end its header and begin another.
"""

from __future__ import annotations

import mimetypes
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from tinkex._transport.sources import BytesSource, FileSource, ObjectSource, Readable, Source
from tinkex.errors import UploadError

__all__ = ["FileContent", "FileForm", "FileForms", "Form"]

FileContent: TypeAlias = bytes | bytearray | memoryview | os.PathLike[str] | Readable
"""What is in a file: the bytes, a path to them (never a ``str``), or a file object opened for reading bytes."""

FileForm: TypeAlias = (
    FileContent
    | tuple[str | None, FileContent]
    | tuple[str | None, FileContent, str | None]
    | tuple[str | None, FileContent, str | None, Mapping[str, str] | None]
)
"""A file: its content, or ``(name, content[, content_type[, headers]])``."""

FileForms: TypeAlias = Mapping[str, FileForm] | Sequence[FileForm]
"""Several files: by the name of their field, or one after the other."""

UNNAMED = "file"
OCTETS = "application/octet-stream"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TEXT = re.compile(r"[^\r\n\x00]*")
_OURS = frozenset({"content-disposition", "content-type"})


class Form:
    """Fields and files, to be sent in this order; what is given is looked at when the form is made, and read when it is sent.

    >>> form = Form({"ttl_seconds": "60"}, [("a.png", b"PNG")], boundary="x")
    >>> form.length, form.repeatable, form.content_type
    (199, True, 'multipart/form-data; boundary=x')
    """

    def __init__(self, fields: Mapping[str, str], files: FileForms, *, boundary: str | None = None) -> None:
        self._boundary = boundary or secrets.token_hex(16)
        self.content_type = f"multipart/form-data; boundary={self._boundary}"
        parts = [*map(_field, fields.items()), *_files(files)]
        if not parts:
            raise UploadError("there is nothing to send: no file was given")
        self._parts = [(f"--{self._boundary}\r\n".encode() + head, source) for head, source in parts]
        self._end = f"--{self._boundary}--\r\n".encode()

    @property
    def length(self) -> int | None:
        """Bytes of the whole body; None while the size of a file object is not known."""
        total = len(self._end)
        for head, source in self._parts:
            if source.size is None:
                return None
            total += len(head) + source.size + len(b"\r\n")
        return total

    @property
    def repeatable(self) -> bool:
        """Whether the body can be sent (again): a file object that cannot be rewound is read once."""
        return all(source.repeatable for _, source in self._parts)

    def read(self) -> FormReading:
        """Reads the body from its beginning; :class:`UploadError` if a file object has been read before."""
        return FormReading(self._parts, self._end)


class FormReading:
    """A form on its way, piece by piece; closing it closes the files that were opened for it."""

    def __init__(self, parts: Sequence[tuple[bytes, Source]], end: bytes) -> None:
        self._parts, self._end = parts, end
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The pieces; none is larger than what is read from a file at once."""
        for head, source in self._parts:
            yield head
            async for piece in source.pieces():
                if self._closed:
                    return
                yield piece
            yield b"\r\n"
        yield self._end

    def close(self) -> None:
        """Ends the reading wherever it is."""
        self._closed = True
        for _, source in self._parts:
            source.close()


def escaped(name: str) -> str:
    """A name as it stands between quotes in a header.

    >>> escaped('a"b' + chr(13) + chr(10) + 'x: y')
    'a%22b%0D%0Ax: y'
    """
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _files(files: FileForms) -> Iterator[tuple[bytes, Source]]:
    if isinstance(files, Mapping):
        for field, form in files.items():
            yield _file(field, form, unnamed=field)
    elif isinstance(files, str | bytes | bytearray | memoryview | os.PathLike) or not isinstance(
        files, Sequence
    ):
        raise UploadError("give several files as a list, or as a mapping from a name to each")
    else:
        for form in files:
            yield _file(UNNAMED, form, unnamed=UNNAMED)


def _file(field: str, form: Any, *, unnamed: str) -> tuple[bytes, Source]:
    name: str | None = None
    content_type: str | None = None
    headers: Mapping[str, str] | None = None
    content = form
    if isinstance(form, tuple):
        if not 2 <= len(form) <= 4:
            raise UploadError("a file as a tuple is (name, content[, content_type[, headers]])")
        name, content, content_type, headers = (*form, None, None)[:4]
    if name is not None and not isinstance(name, str):
        raise UploadError(f"the name of a file is a str or None, not {type(name).__name__}")
    source, own_name = _source(content)
    shown = name or own_name or unnamed
    kind = content_type or mimetypes.guess_type(shown)[0] or OCTETS
    if not kind.isascii() or not _TEXT.fullmatch(kind):
        raise UploadError(f"{kind!r} is no content type; give one such as image/png")
    lines = [
        f'Content-Disposition: form-data; name="{escaped(field)}"; filename="{escaped(shown)}"',
        f"Content-Type: {kind}",
        *_headers(headers or {}),
    ]
    # A name from a disk that is no UTF-8 (lone surrogates) is shown with question marks.
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "replace"), source


def _field(item: tuple[str, str]) -> tuple[bytes, Source]:
    name, value = item
    head = f'Content-Disposition: form-data; name="{escaped(name)}"\r\n\r\n'
    return head.encode("utf-8", "replace"), BytesSource(value.encode())


def _headers(headers: Mapping[str, str]) -> Iterator[str]:
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name) or not _TEXT.fullmatch(value):
            raise UploadError(
                f"{name!r} cannot be a header of a file: neither name nor value holds line ends"
            )
        if name.lower() in _OURS:
            raise UploadError(f"{name} of a file is made from its name and content type; give these instead")
        yield f"{name}: {value}"


def _source(content: Any) -> tuple[Source, str | None]:
    """Where the bytes come from, and the name that is known for them."""
    if isinstance(content, str):
        raise UploadError(
            "a str is neither a path nor the content of a file: give pathlib.Path(…) or text.encode()"
        )
    if isinstance(content, bytes | bytearray | memoryview):
        return BytesSource(bytes(content)), None
    if isinstance(content, os.PathLike):
        path = Path(os.fsdecode(content))
        return FileSource(path), path.name
    if callable(getattr(content, "read", None)):
        name = None
        with suppress(TypeError):  # the name of a pipe or a temporary file may be a number
            name = Path(os.fsdecode(getattr(content, "name", None))).name or None  # type: ignore[arg-type] # asked above
        return ObjectSource(content, name or "the file object"), name
    raise UploadError(
        f"{type(content).__name__} is no file: give bytes, a pathlib.Path, or a file object opened with 'rb'"
    )
