"""Files as the body of a request (``multipart/form-data``, RFC 7578), read while they are sent.

Names are encoded as browsers encode them: in UTF-8, with ``"``, CR and LF as ``%22``, ``%0D`` and ``%0A``, so that no name
can inject a header.
"""

from __future__ import annotations

import mimetypes
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, TypeAlias

from tinkex._transport.sources import BytesSource, FileSource, ObjectSource, Readable, UploadSource
from tinkex.errors import UploadError

__all__ = ["FileContent", "FileForm", "FileForms", "Form", "FormFiles", "form_fields"]

FileContent: TypeAlias = bytes | bytearray | memoryview | os.PathLike[str] | Readable
"""The content of a file: bytes, a path (never a ``str``), or a file object opened in binary mode."""

FileForm: TypeAlias = (
    FileContent
    | tuple[str | None, FileContent]
    | tuple[str | None, FileContent, str | None]
    | tuple[str | None, FileContent, str | None, Mapping[str, str] | None]
)
"""A file: its content, or ``(name, content[, content_type[, headers]])``."""

FileForms: TypeAlias = Mapping[str, FileForm] | Sequence[FileForm]
"""Several files: by field name, or as a sequence."""

FormFiles: TypeAlias = FileForms | Sequence[FileForm | tuple[str, FileForm]]
"""The files of a form: as a sequence also ``(field, (name, content, …))``, so that a field can have several files."""

DEFAULT_NAME = "file"
BINARY = "application/octet-stream"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TEXT = re.compile(r"[^\r\n\x00]*")
_RESERVED_HEADERS = frozenset({"content-disposition", "content-type"})


class Form:
    """A form of fields and files, sent in this order; files are checked when the form is made, and read when it is sent.

    >>> form = Form({"ttl_seconds": "60"}, [("a.png", b"PNG")], boundary="x")
    >>> form.length, form.repeatable, form.content_type
    (170, True, 'multipart/form-data; boundary=x')
    """

    def __init__(self, fields: Mapping[str, Any], files: FormFiles, *, boundary: str | None = None) -> None:
        self._boundary = boundary or secrets.token_hex(16)
        self.content_type = f"multipart/form-data; boundary={self._boundary}"
        parts = [*map(_field, form_fields(fields)), *_files(files)]
        if not parts:
            raise UploadError("the form is empty: give at least one file")
        self._parts = [(f"--{self._boundary}\r\n".encode() + head, source) for head, source in parts]
        self._end = f"--{self._boundary}--\r\n".encode()

    @property
    def length(self) -> int | None:
        """The size of the body in bytes; None if the size of a file object is unknown."""
        total = len(self._end)
        for head, source in self._parts:
            if source.size is None:
                return None
            total += len(head) + source.size + len(b"\r\n")
        return total

    @property
    def repeatable(self) -> bool:
        """Whether the body can be sent (again): a file object that cannot be rewound is read only once."""
        return all(source.repeatable for _, source in self._parts)

    def read(self) -> FormBodyReader:
        """Reads the body from its beginning; raises ``UploadError`` if a file object cannot be rewound."""
        return FormBodyReader(self._parts, self._end)


class FormBodyReader:
    """One pass over the body of a form; closing it closes the files that it opened."""

    def __init__(self, parts: Sequence[tuple[bytes, UploadSource]], end: bytes) -> None:
        self._parts, self._end = parts, end
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields the body in chunks of bounded size."""
        for head, source in self._parts:
            yield head
            async for chunk in source.chunks():
                if self._closed:
                    return
                yield chunk
            yield b"\r\n"
        yield self._end

    def close(self) -> None:
        """Stops reading and closes the files."""
        self._closed = True
        for _, source in self._parts:
            source.close()


def form_fields(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested values as the fields of a form, in order: ``a[b]`` for mappings, ``a[]`` for each item of a list.

    None is an empty text; numbers, booleans and times are written as in JSON.

    >>> form_fields({"note": {"lang": "en", "tags": ["a", "b"]}, "draft": True, "ttl": None})
    [('note[lang]', 'en'), ('note[tags][]', 'a'), ('note[tags][]', 'b'), ('draft', 'true'), ('ttl', '')]
    """
    return [pair for name, value in fields.items() for pair in _flattened(str(name), value)]


def _flattened(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flattened(f"{name}[{key}]", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flattened(f"{name}[]", item)
    elif value is None:
        yield name, ""
    elif isinstance(value, bool):
        yield name, "true" if value else "false"
    elif isinstance(value, str | int | float):
        yield name, str(value)
    elif isinstance(value, date):
        yield name, value.isoformat()
    else:
        raise UploadError(
            f"the field {name!r} is a {type(value).__name__}; fields are text, numbers, booleans, times, None, and "
            "lists and mappings of these. Give files as files"
        )


def escaped(name: str) -> str:
    """A name as it is quoted in a header.

    >>> escaped('a"b' + chr(13) + chr(10) + 'x: y')
    'a%22b%0D%0Ax: y'
    """
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _files(files: FormFiles) -> Iterator[tuple[bytes, UploadSource]]:
    if isinstance(files, Mapping):
        for field, form in files.items():
            yield _file(field, form, default_name=field)
    elif isinstance(files, str | bytes | bytearray | memoryview | os.PathLike) or not isinstance(
        files, Sequence
    ):
        raise UploadError("give several files as a list, or as a mapping from a name to each")
    else:
        given: Any
        for given in files:
            has_field = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], tuple)
            field, form = given if has_field else (DEFAULT_NAME, given)
            if not isinstance(field, str):
                raise UploadError(f"the field of a file is a str, not {type(field).__name__}")
            yield _file(field, form, default_name=field)


def _file(field: str, form: Any, *, default_name: str) -> tuple[bytes, UploadSource]:
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
    shown = name or own_name or default_name
    kind = content_type or mimetypes.guess_type(shown)[0] or BINARY
    if not kind.isascii() or not _TEXT.fullmatch(kind):
        raise UploadError(f"{kind!r} is not a content type; give one such as image/png")
    lines = [
        f'Content-Disposition: form-data; name="{escaped(field)}"; filename="{escaped(shown)}"',
        f"Content-Type: {kind}",
        *_headers(headers or {}),
    ]
    # Lone surrogates in a file name that is not UTF-8 become question marks.
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "replace"), source


def _field(item: tuple[str, str]) -> tuple[bytes, UploadSource]:
    name, value = item
    head = f'Content-Disposition: form-data; name="{escaped(name)}"\r\n\r\n'
    return head.encode("utf-8", "replace"), BytesSource(value.encode())


def _headers(headers: Mapping[str, str]) -> Iterator[str]:
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name) or not _TEXT.fullmatch(value):
            raise UploadError(
                f"{name!r} is not a valid header of a file: names are tokens, and values have no line breaks"
            )
        if name.lower() in _RESERVED_HEADERS:
            raise UploadError(
                f"the header {name} is set from the name and content type of a file; give these instead"
            )
        yield f"{name}: {value}"


def _source(content: Any) -> tuple[UploadSource, str | None]:
    """The source of a file's content, and the file's own name if it has one."""
    if isinstance(content, str):
        raise UploadError("a str is ambiguous: give pathlib.Path(…) for a path, or text.encode() for content")
    if isinstance(content, bytes | bytearray | memoryview):
        return BytesSource(bytes(content)), None
    if isinstance(content, os.PathLike):
        path = Path(os.fsdecode(content))
        return FileSource(path), path.name
    if callable(getattr(content, "read", None)):
        name = None
        with suppress(TypeError):  # the name of a pipe or a temporary file may be an int
            name = Path(os.fsdecode(getattr(content, "name", None))).name or None  # type: ignore[arg-type] # suppressed above
        return ObjectSource(content, name or "the file object"), name
    raise UploadError(
        f"{type(content).__name__} is not a file: give bytes, a pathlib.Path, or a file object opened with 'rb'"
    )
