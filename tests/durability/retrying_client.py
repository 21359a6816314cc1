"""A client that retries every request until it gets a response, and fails on a response that a crash must not cause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.durability.programs import JSON, PROTO, Body

AGAIN_S = 0.05
PATIENCE_S = 600.0
"""How long a server may be down, or a result may take, before the program fails."""


class UnexpectedResponseError(AssertionError):
    """The client got a response that an undisturbed server would not send."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class RetryingClient:
    """Sends requests to one address while its server is killed and restarted. ``moved`` is called on every progress."""

    port: int
    key: str
    rng: random.Random
    moved: Callable[[], None] = lambda: None
    lost: int = 0
    """Requests without a response."""
    repeated: int = 0
    """Submissions and fetches that were repeated after a response."""
    _idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    async def submit(self, make: Callable[[], Body]) -> str | None:
        """Returns the request id of an operation, or None if it was permanently rejected."""
        answer = await self.post(make)
        if answer.status == 400:
            return None
        request_id = str(answer.json["request_id"])
        if self.rng.random() < 0.1:
            self.repeated += 1
            again = await self.post(make)
            if again.status != 200 or again.json["request_id"] != request_id:
                raise UnexpectedResponseError(f"{make().endpoint} sent twice: {answer} and {again}")
        return request_id

    async def result(self, request_id: str) -> Answer:
        """Returns the outcome of an operation."""
        found = await self._poll(request_id)
        if self.rng.random() < 0.1:
            self.repeated += 1
            again = await self._poll(request_id)
            if again.content != found.content:
                raise UnexpectedResponseError(f"the result of {request_id} changed: {found} and {again}")
        return found

    async def post(self, make: Callable[[], Body]) -> Answer:
        """Returns a success or a permanent rejection."""

        async def once() -> Answer | None:
            body = make()
            answer = await self.call(
                "POST", f"/api/v1/{body.endpoint}", body.content, body.content_type, accept=JSON
            )
            return None if answer.status == 503 else answer

        return await self._until(once, allowed={200, 400})

    async def get(self, path: str) -> Answer:
        async def once() -> Answer | None:
            answer = await self.call("GET", path)
            return None if answer.status == 503 else answer

        return await self._until(once, allowed={200, 302})

    async def _poll(self, request_id: str) -> Answer:
        content = json.dumps({"request_id": request_id, "allow_metadata_only": False}).encode()

        async def once() -> Answer | None:
            answer = await self.call("POST", "/api/v1/retrieve_future", content, accept=PROTO)
            return None if answer.status in {408, 503} else answer

        return await self._until(once, allowed={200})

    async def _until(self, once: Callable[[], Any], allowed: set[int]) -> Answer:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    answer: Answer | None = await once()
                except (OSError, EOFError):
                    self.lost += 1
                    answer = None
                if answer is not None:
                    if answer.status not in allowed:
                        raise UnexpectedResponseError(f"{answer.status} {answer.content[:500]!r}")
                    self.moved()
                    return answer
                await asyncio.sleep(AGAIN_S)

    async def call(
        self, method: str, path: str, content: bytes = b"", content_type: str = JSON, accept: str = JSON
    ) -> Answer:
        """Send one request on a persistent connection; raises OSError or EOFError if there is no response."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nX-API-Key: {self.key}\r\n"
            head += (
                f"Accept: {accept}\r\nContent-Type: {content_type}\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            writer.write(head.encode() + content)
            await writer.drain()
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:-2])
            }
            found = await reader.readexactly(int(headers["content-length"]))
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        return Answer(int(lines[0].split()[1]), headers, found)

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self._idle.clear()
