"""The part of the Hugging Face Hub's API that pushing uses, over files in memory."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.http_server import Handler, listening


@dataclass
class Hub:
    url: str = ""
    token: str = "hf_right"
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Repository → branch → file → content."""
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def hub() -> Iterator[Hub]:
    there = Hub()

    class HubHandler(Handler):
        def _answer(self, status: int, value: Any = None, **headers: str) -> None:
            body = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, content in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), content)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _allowed(self) -> bool:
            if self.headers.get("Authorization") == f"Bearer {there.token}":
                return True
            self._answer(401, {"error": "Invalid credentials"})
            return False

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/api/whoami-v2":
                if self._allowed():
                    self._answer(200, {"type": "user", "name": "ada", "orgs": []})
                return
            if "/tree/" in path:
                repo, _, revision = self._parts(path)
                files = there.repos[repo][revision]
                self._answer(200, [{"type": "file", "path": name, "oid": "0" * 40, "size": len(content)} for name, content in files.items()])  # fmt: skip
                return
            self._resolve(path)

        def do_HEAD(self) -> None:
            self._resolve(urlsplit(self.path).path)

        def _resolve(self, path: str) -> None:
            repo, _, rest = path.strip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            branches = there.repos.get(repo)
            if branches is None:
                self._answer(404, X_Error_Code="RepoNotFound")
            elif unquote(revision) not in branches:
                self._answer(404, X_Error_Code="RevisionNotFound")
            elif file not in branches[unquote(revision)]:
                self._answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit="0" * 40)
            else:
                content = branches[unquote(revision)][file]
                etag = hashlib.sha1(content).hexdigest()
                self._answer(200, content, ETag=f'"{etag}"', X_Repo_Commit="0" * 40)

        def do_PUT(self) -> None:
            there.blobs[self.path.rpartition("/")[2]] = self._body()
            self._answer(200)

        def do_POST(self) -> None:
            path, query = urlsplit(self.path).path, urlsplit(self.path).query
            body = self._body()
            if path == "/api/validate-yaml":
                self._answer(200, {"errors": [], "warnings": []})
                return
            if not self._allowed():
                return
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'ada'}/{asked['name']}"
                status = 409 if name in there.repos else 200
                there.repos.setdefault(name, {"main": {}})
                there.private.setdefault(
                    name, bool(asked.get("private") or asked.get("visibility") == "private")
                )
                self._answer(status, {"url": f"{there.url}/{name}", "name": name})
                return
            if path.endswith("/objects/batch"):
                self._lfs(json.loads(body))
                return
            repo, action, revision = self._parts(path)
            branches = there.repos[repo]
            if action == "branch":
                status = 409 if revision in branches else 200
                branches.setdefault(revision, dict(branches["main"]))
                self._answer(status, {})
            elif action == "preupload":
                files = [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for one in json.loads(body)["files"]
                ]
                self._answer(200, {"files": files})
            else:
                self._commit(repo, revision, body, query)

        def _parts(self, path: str) -> tuple[str, str, str]:
            _, _, user, name, action, revision = path.strip("/").split("/", 5)
            return f"{user}/{name}", action, unquote(revision)

        def _lfs(self, asked: dict[str, Any]) -> None:
            objects = [
                {**one, "actions": {"upload": {"href": f"{there.url}/blobs/{one['oid']}"}}}
                for one in asked["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})

        def _commit(self, repo: str, revision: str, body: bytes, query: str) -> None:
            lines = [json.loads(line) for line in body.splitlines()]
            is_pr = "create_pr=1" in query
            branch = "refs/pr/1" if is_pr else revision
            files = there.repos[repo].setdefault(branch, {})
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    there.commits.append({"repo": repo, "branch": branch, "summary": value["summary"]})
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
                else:
                    files[value["path"]] = there.blobs[value["oid"]]
            pull = {"pullRequestUrl": f"{there.url}/{repo}/discussions/1"} if is_pr else {}
            url = f"{there.url}/{repo}/commit/{'0' * 40}"
            self._answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": url, **pull})

    with listening(HubHandler) as there.url:
        yield there
