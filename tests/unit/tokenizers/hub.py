"""A loopback stand-in for the hub: files of repositories by revision, with or without a token."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.http_server import Handler, listening

MAIN = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """``repositories`` maps (name, revision) to a directory; ``asked`` is what was asked for."""

    repositories: Mapping[tuple[str, str], Path]
    token: str | None = None
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/api/"):  # no lists of files here
            return 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no such folder"}, b"{}"
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match is None or (self.token is not None and authorization != f"Bearer {self.token}"):
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"}, b""
        name, revision, file = match.groups()
        home = self.repositories.get((name, "main" if revision == MAIN else revision))
        if home is None:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"}, b""
        commit = MAIN if revision in {"main", MAIN} else revision
        headers = {"X-Repo-Commit": commit}
        if not (home / file).is_file():
            return 404, {**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "no such file"}, b""
        content = (home / file).read_bytes()
        return 200, {**headers, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, content


@contextmanager
def hub_of(repositories: Mapping[tuple[str, str], Path], token: str | None = None) -> Iterator[Hub]:
    hub = Hub(repositories, token)

    class HubHandler(Handler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            status, headers, body = hub.answer(path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

    with listening(HubHandler) as hub.url:
        yield hub
