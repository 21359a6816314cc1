"""Signed URLs: files that a server stores elsewhere, fetched from whatever host has them, or sent to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from tinkex._transport.base import Request
from tinkex._transport.caller import USER_AGENT, Caller
from tinkex._transport.shared import SharedHttp
from tinkex._wire.endpoints import SIGNED_UPLOAD, SIGNED_URL, Endpoint
from tinkex.errors import APIConnectionError, APIStatusError, HttpRequest, SetupError

if TYPE_CHECKING:
    from tinkex._transport.base import Upload
    from tinkex._transport.call_stream import CallStream
    from tinkex.config import Config
    from tinkex.observability.events import Sink

__all__ = ["SignedUrls", "redirect_target", "shown_url"]

T = TypeVar("T")

MAX_REDIRECTS = 5
_RESERVED = "%/:?@!$&'()*+,;=~[]"
"""Not quoted again: a signature is valid only for the URL as it is."""


class SignedUrls:
    """Fetches signed URLs, and sends files to them, with the proxy, certificates, timeouts, retries and limits of a configuration.

    A signed URL may lead to any host, so nothing that belongs to the caller is sent: neither the API key nor
    default headers nor default query parameters. Used on the background loop only.
    """

    def __init__(self, config: Config, *, sink: Sink | None = None) -> None:
        self._config = config
        self._sink = sink
        self._callers: dict[str, Caller] = {}

    async def read(self, url: str) -> bytes:
        """Returns the whole content of a URL; failures are retried as those of any call."""

        async def send(caller: Caller, request: Request) -> bytes:
            return (await caller.send(SIGNED_URL, request)).body

        return await self._follow(url, {}, send)

    async def open(self, url: str, *, headers: Mapping[str, str], attempt: int = 0) -> CallStream:
        """Requests a URL once and returns its response while that arrives; an error status is raised as its typed error."""

        async def send(caller: Caller, request: Request) -> CallStream:
            return await caller.open_stream(SIGNED_URL, request, attempt)

        return await self._follow(url, {"accept-encoding": "identity", **headers}, send)

    async def put(
        self, url: str, upload: Upload | None, *, headers: Mapping[str, str], attempt: int = 0
    ) -> Mapping[str, str]:
        """Sends a file to a URL once, or an empty body, and returns the headers of the reply.

        An error status is raised as its typed error, and so is 308 without a ``location``: the server has a part of the
        file.
        """

        async def send(caller: Caller, request: Request) -> Mapping[str, str]:
            stream = await caller.open_stream(SIGNED_UPLOAD, replace(request, upload=upload), attempt)
            try:
                while await stream.read():
                    pass
                return stream.headers
            finally:
                await stream.close()

        kind = {"content-type": upload.content_type} if upload is not None else {}
        sent = {"accept-encoding": "identity", **kind, **headers}
        return await self._follow(url, sent, send, SIGNED_UPLOAD)

    async def close(self) -> None:
        """Closes the connections."""
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            await caller.close()

    async def _follow(
        self,
        url: str,
        headers: Mapping[str, str],
        send: Callable[[Caller, Request], Awaitable[T]],
        endpoint: Endpoint = SIGNED_URL,
    ) -> T:
        first = url
        for _ in range(MAX_REDIRECTS + 1):
            caller, request = self._prepare(url, headers, endpoint)
            try:
                return await send(caller, request)
            except APIStatusError as error:
                location = redirect_target(error)
                if location is None:
                    raise
                url = _redirected(url, location)
        about = HttpRequest(endpoint.method, shown_url(first), endpoint.name)
        raise APIConnectionError(about, f"{about.url} redirects more than {MAX_REDIRECTS} times")

    def _prepare(self, url: str, headers: Mapping[str, str], endpoint: Endpoint) -> tuple[Caller, Request]:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
            raise SetupError(f"{shown_url(url)} is not a signed http or https URL; nothing was transferred")
        origin = f"{parts.scheme}://{parts.netloc}"
        caller = self._callers.get(origin)
        if caller is None:
            config = _anonymous(self._config, origin)
            caller = self._callers[origin] = Caller(SharedHttp(config), config, sink=self._sink)
        query = f"?{quote(parts.query, safe=_RESERVED)}" if parts.query else ""
        request = Request(
            endpoint.method,
            (quote(parts.path, safe=_RESERVED) or "/") + query,
            {"accept": "*/*", "user-agent": USER_AGENT, **headers},
            purpose=endpoint.purpose,
            timeout=self._config.timeout,
            endpoint=endpoint.name,
            shown_path=f"/…/{parts.path.rpartition('/')[2]}",
        )
        return caller, request


def redirect_target(error: APIStatusError) -> str | None:
    """Where a reply redirects to; None if it does not."""
    headers = {name.lower(): value for name, value in error.response.headers.items()}
    return headers.get("location") if 300 <= error.status_code < 400 else None


def shown_url(url: str) -> str:
    """A URL as messages show it: without user, directories and query, which may sign it.

    >>> shown_url("https://files.example/token/adapter.tar?signature=abc")
    'https://files.example/…/adapter.tar'
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}/…/{parts.path.rpartition('/')[2]}"


def _redirected(url: str, location: str) -> str:
    target = urljoin(url, location)
    if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
        raise SetupError(
            f"{shown_url(url)} redirects to {shown_url(target)}, which is not encrypted; nothing was transferred"
        )
    return target


def _anonymous(config: Config, base_url: str) -> Config:
    """The configuration without everything that identifies its user, for another host."""
    return replace(
        config,
        base_url=base_url,
        api_key=None,
        credential_cmd=None,
        project_id=None,
        tags=(),
        user_metadata={},
        default_headers={},
        default_query={},
        cloudflare_client_id=None,
        cloudflare_client_secret=None,
    )
