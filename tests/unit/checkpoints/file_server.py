"""A web server for one file that can break, move, change and lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.http_server import Handler, listening


@dataclass
class Served:
    content: bytes
    url: str = ""
    path: str = "/file"
    etag: str | None = '"v1"'
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)
    """Bytes after which each of the next answers breaks off."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers, before any content."""
    claimed_bytes: int | None = None
    """Size that is announced, where it is not the true one."""
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[str | None] = field(default_factory=list)
    """The Range header of every request."""


@contextmanager
def file_server(content: bytes) -> Iterator[Served]:
    served = Served(content)

    class FileHandler(Handler):
        protocol_version = "HTTP/1.0"  # the end of an answer is the end of its connection

        def do_GET(self) -> None:
            served.asked.append(self.headers.get("Range"))
            if self.path.partition("?")[0] != served.path:
                self._end(403)
                return
            if served.statuses:
                self._end(served.statuses.pop(0))
                return
            start, status = 0, 200
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            same = self.headers.get("If-Range") in {None, served.etag}
            if served.ranges and wanted is not None and same:
                start, status = int(wanted[1]), 206
                if start >= len(served.content):
                    self._end(416)
                    return
            body = served.content[start:]
            self.send_response(status)
            self.send_header("Content-Length", str(served.claimed_bytes or len(body)))
            if status == 206:
                end = len(served.content)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
            if served.etag is not None:
                self.send_header("ETag", served.etag)
            for name, value in served.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if served.break_after:
                self.wfile.write(body[: served.break_after.pop(0)])
                self.close_connection = True
            else:
                self.wfile.write(body)

        def _end(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with listening(FileHandler) as url:
        served.url = f"{url}/file"
        yield served
