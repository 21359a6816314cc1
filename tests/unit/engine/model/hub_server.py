"""A loopback stand-in for the hub's HTTP protocol: model info, and files by revision."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.http_server import Handler, listening

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """Serves directories as models; ``requests`` is what was asked, ``withheld`` answers 404 for a file."""

    url: str
    models: dict[str, Path]
    token: str | None = None
    requests: list[str] = field(default_factory=list)
    withheld: set[str] = field(default_factory=set)

    def respond(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.token is not None and authorization != f"Bearer {self.token}":
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if info and info[1] in self.models and info[2] in {None, "main", "v1", SHA}:
            return 200, {}, json.dumps(self._info(info[1])).encode()
        if file and file[1] in self.models and file[2] == SHA and file[3] not in self.withheld:
            content = (self.models[file[1]] / file[3]).read_bytes()
            etag = hashlib.sha256(content).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}, content
        code = (
            "EntryNotFound"
            if file
            else "RevisionNotFound"
            if info and info[1] in self.models
            else "RepoNotFound"
        )
        return 404, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"

    def _info(self, name: str) -> dict[str, object]:
        files = sorted(path for path in self.models[name].rglob("*") if path.is_file())
        siblings = [
            {
                "rfilename": str(path.relative_to(self.models[name])),
                "size": path.stat().st_size,
                "blobId": "0" * 40,
            }
            for path in files
        ]
        return {"id": name, "modelId": name, "sha": SHA, "siblings": siblings, "tags": [], "private": False}


@contextmanager
def hub_server(models: dict[str, Path], token: str | None = None) -> Iterator[HubServer]:
    class HubHandler(Handler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            status, headers, body = hub.respond(path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

    with listening(HubHandler) as url:
        hub = HubServer(url, models, token)
        yield hub
