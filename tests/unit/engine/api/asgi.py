"""Calls an ASGI application the way a server does, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PROTO = "application/x-protobuf"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def detail(self) -> str:
        assert int(self.headers["content-length"]) == len(self.body) > 0
        detail: str = self.json["detail"]
        return detail


@dataclass(frozen=True)
class Client:
    app: Any
    key: str | None = None
    host: str | None = "127.0.0.1"
    """None: a caller in this process."""

    def call(
        self,
        method: str,
        url: str,
        body: bytes | dict[str, Any] = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        return asyncio.run(self.acall(method, url, body, headers))

    async def acall(
        self,
        method: str,
        url: str,
        body: bytes | dict[str, Any] = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        given = {"content-type": "application/json", **(headers or {})}
        if self.host is not None:
            given.setdefault("host", "127.0.0.1")
        if self.key is not None:
            given.setdefault("x-api-key", self.key)
        parts = urlsplit(url)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "client": None if self.host is None else (self.host, 1),
            "server": ("127.0.0.1", 80),
        }
        # Two messages, as from a socket.
        half = len(content) // 2
        pieces = [
            {"type": "http.request", "body": content[:half], "more_body": True},
            {"type": "http.request", "body": content[half:], "more_body": False},
        ]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not pieces:
                # The client stays connected until the response is complete.
                await asyncio.get_running_loop().create_future()
            return pieces.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        start = sent[0]
        return Answer(
            status=start["status"],
            headers={name.decode(): value.decode() for name, value in start["headers"]},
            body=b"".join(message.get("body", b"") for message in sent[1:]),
        )

    def post(self, name: str, body: bytes | dict[str, Any], **headers: str) -> Answer:
        return self.call(
            "POST", f"/api/v1/{name}", body, {k.replace("_", "-"): v for k, v in headers.items()}
        )

    def get(self, path: str) -> Answer:
        return self.call("GET", f"/api/v1/{path}")

    def result(self, submitted: Answer, **headers: str) -> Answer:
        """Polls until there is an outcome."""
        assert submitted.status == 200, submitted.body
        for _ in range(600):
            answer = self.post("retrieve_future", {"request_id": submitted.json["request_id"]}, **headers)
            if answer.status != 408:
                return answer
        raise AssertionError("no result")

    def session(self) -> str:
        session_id: str = self.post("create_session", {"tags": [], "sdk_version": "0.36.0"}).json[
            "session_id"
        ]
        return session_id

    def create(self, session: str | None = None, number: int = 0, **lora: Any) -> str:
        request = {
            "session_id": session or self.session(),
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 4, "seed": 1, **lora},
            "optimizer_config": {"type": "adamw"},
            "user_metadata": {"who": "me"},
            "type": "create_model",
        }
        model_id: str = self.result(self.post("create_model", request)).json["model_id"]
        return model_id
