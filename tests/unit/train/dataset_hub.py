"""A loopback stand-in for the part of the Hugging Face Hub that loading a dataset by its name uses."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.http_server import Handler, listening

SHA = "0123456789abcdef0123456789abcdef01234567"
REPO = r"([\w.-]+/[\w.-]+)"


@contextmanager
def dataset_hub(datasets: Mapping[str, Path], token: str | None = None) -> Iterator[str]:
    """Serves directories as datasets of one revision; yields the URL. With a token, others get no dataset."""

    class DatasetHandler(Handler):
        def do_GET(self) -> None:
            self._reply(unquote(urlsplit(self.path).path), {})

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            asked = json.loads(body) if body.startswith("{") else parse_qs(body)
            self._reply(unquote(urlsplit(self.path).path), asked)

        def _reply(self, path: str, asked: Mapping[str, Any]) -> None:
            found = re.match(rf"/(?:api/)?datasets/{REPO}", path)
            allowed = token is None or self.headers.get("Authorization") == f"Bearer {token}"
            if not found or found[1] not in datasets or not allowed:
                self._send(
                    401 if token else 404,
                    b"{}",
                    X_Error_Code="RepoNotFound",
                    X_Error_Message="Repository not found",
                )
                return
            folder = datasets[found[1]]
            rest = path[found.end() :]
            if rest.startswith("/resolve/"):
                self._send_file(folder / rest.removeprefix("/resolve/").partition("/")[2])
            elif rest.startswith("/tree/"):
                self._send_json(_entries(folder, rest.removeprefix("/tree/").partition("/")[2]))
            elif rest.startswith("/paths-info/"):
                wanted = asked.get("paths", ())
                self._send_json([one for one in _entries(folder, "") if one["path"] in wanted])
            else:
                files = [{"rfilename": one["path"]} for one in _entries(folder, "")]
                self._send_json({"id": found[1], "sha": SHA, "siblings": files, "tags": [], "private": False})

        def _send_file(self, file: Path) -> None:
            if not file.is_file():
                self._send(
                    404,
                    b"{}",
                    X_Error_Code="EntryNotFound",
                    X_Error_Message="Entry not found",
                    X_Repo_Commit=SHA,
                )
                return
            content = file.read_bytes()
            etag = hashlib.sha256(content).hexdigest()
            self._send(200, content, ETag=f'"{etag}"', X_Repo_Commit=SHA, Accept_Ranges="bytes")

        def _send_json(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), Content_Type="application/json")

        def _send(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content_Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with listening(DatasetHandler) as url:
        yield url


def _entries(folder: Path, under: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "file" if path.is_file() else "directory",
            "path": path.relative_to(folder).as_posix(),
            "size": path.stat().st_size,
            "oid": hashlib.sha1(path.read_bytes() if path.is_file() else b"").hexdigest(),
        }
        for path in sorted((folder / under).rglob("*"))
    ]
