"""HTTP over TLS, HTTP/2 and proxies, through the library pyqwest; imported when it is first needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit, urlunsplit

import pyqwest

from tinkex._transport.base import Reply, Request
from tinkex._transport.http1 import ReplyTooLarge, accepted_encodings, decompress, reply_too_large
from tinkex._transport.pyqwest_stream import FAILURES, PyqwestStream
from tinkex.config.values import without_userinfo
from tinkex.errors import APIConnectionError, APITimeoutError, SetupError

if TYPE_CHECKING:
    from tinkex._wire.endpoints import Purpose
    from tinkex.config import Config

__all__ = ["PyqwestTransport"]

CONNECT_TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 24 * 3600.0
_URL = re.compile(r" for url \([^)]*\)")
MAX_IDLE_CONNECTIONS = 256
"""Kept open per pool: bursts of samples and polls would otherwise connect again and again."""


class PyqwestTransport:
    """Sends requests to the base URL of a configuration, through its proxy, trusting its certificates."""

    def __init__(self, config: Config) -> None:
        self._base_url = config.base_url
        self._proxy = config.proxy
        self._proxy_headers = dict(config.proxy_headers)
        self._via = f" through the proxy {without_userinfo(config.proxy)}" if config.proxy else ""
        self._ca_file = config.ca_file
        self._pool_size = config.pool_size
        self._pools: dict[tuple[Purpose, float], tuple[pyqwest.HTTPTransport, pyqwest.Client]] = {}

    async def send(self, request: Request) -> Reply:
        """Sends one request; raises ``APIConnectionError`` if there is no complete reply."""
        _check_same_process()
        query = f"?{urlencode(request.query)}" if request.query else ""
        try:
            reply = await self._client(request.purpose, request.timeout).execute(
                request.method,
                self._base_url + request.path + query,
                {"accept-encoding": accepted_encodings(), **request.headers},
                request.body or None,
            )
        except TimeoutError as error:
            about = request.about(self._base_url)
            if isinstance(error, pyqwest.ConnectTimeout):
                message = f"no connection to {self._base_url}{self._via} within {CONNECT_TIMEOUT_S:g} s"
                raise APITimeoutError(about, message) from error
            shown = request.shown_path or request.path
            message = f"{self._base_url} did not reply to {shown} within {request.timeout:g} s"
            raise APITimeoutError(about, message) from error
        except FAILURES as error:
            raise APIConnectionError(request.about(self._base_url), self._explain(error)) from error
        headers = {name.lower(): value for name, value in reply.headers.items()}
        try:
            return Reply(reply.status, headers, decompress(reply.content, headers.get("content-encoding")))
        except ReplyTooLarge as error:
            error.status = reply.status
            raise reply_too_large(request.about(self._base_url), error) from error
        except ValueError as error:
            message = f"the reply of {self._base_url} cannot be decompressed: {error}"
            raise APIConnectionError(request.about(self._base_url), message) from error

    async def stream(self, request: Request) -> PyqwestStream:
        """Sends one request and returns its response while that arrives."""
        _check_same_process()
        # pyqwest's timeout is for a whole response, and a stream may take as long as it likes.
        client = self._client(request.purpose, STREAM_TIMEOUT_S)
        return await PyqwestStream.open(client, self._base_url, request, self._explain)

    async def close(self) -> None:
        """Closes every pool."""
        pools, self._pools = self._pools, {}
        for transport, _ in pools.values():
            await transport.aclose()

    def _client(self, purpose: Purpose, timeout: float) -> pyqwest.Client:
        # pyqwest's own timeout belongs to a pool and costs nothing per request. The calls of one purpose
        # have one or two different timeouts, so there are few pools.
        pool = self._pools.get((purpose, timeout))
        if pool is None:
            transport = pyqwest.HTTPTransport(
                tls_include_system_certs=self._base_url.startswith("https:")
                or (self._proxy or "").startswith("https:"),
                tls_ca_cert=None if self._ca_file is None else self._ca_file.read_bytes(),
                proxy=_proxy(self._proxy, self._proxy_headers) if self._proxy else None,
                timeout=timeout,
                connect_timeout=CONNECT_TIMEOUT_S,
                pool_max_idle_per_host=min(MAX_IDLE_CONNECTIONS, self._pool_size or MAX_IDLE_CONNECTIONS),
                max_connections_per_address=self._pool_size,
                use_system_dns=True,
                follow_redirects=False,
                # Decompressed here, within limits.
                enable_gzip=False,
                enable_brotli=False,
                enable_zstd=False,
                enable_otel=False,
            )
            pool = self._pools[purpose, timeout] = (transport, pyqwest.Client(transport))
        return pool[1]

    def _explain(self, error: Exception) -> str:
        # pyqwest has one type for all failures to connect, and a chain of messages that quotes the URL, signature included.
        cause = _URL.sub("", str(error)).rpartition(": ")[2]
        message = f"no reply from {self._base_url}{self._via}: {cause}"
        connects = isinstance(error, ConnectionError) and self._base_url.startswith("https:")
        if connects and self._ca_file is None:
            message += (
                ". If its certificate comes from a private authority, give the authority's certificate "
                "as ca_file=… or in SSL_CERT_FILE"
            )
        return message


def _proxy(url: str, headers: Mapping[str, str]) -> pyqwest.Proxy:
    """The proxy with its headers; a ``proxy-authorization`` among them replaces user and password of the URL."""
    if any(name.lower() == "proxy-authorization" for name in headers):
        parts = urlsplit(url)
        url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return pyqwest.Proxy(url, headers=headers)


_first_process: int | None = None


def _check_same_process() -> None:
    """Raises ``SetupError`` in a forked child: pyqwest's threads do not survive a fork, and a request would hang."""
    global _first_process  # noqa: PLW0603 - a fact about the process
    process = os.getpid()
    if _first_process is None:
        _first_process = process
    elif _first_process != process:
        raise SetupError(
            "this process was forked from one that had already used a client over HTTP; start worker "
            "processes with multiprocessing.get_context('spawn'), or fork before the first call"
        )
