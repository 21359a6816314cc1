"""Streamed requests and responses over TLS, HTTP/2 or a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlencode

import pyqwest

from tinkex._transport.base import Request, Upload
from tinkex._transport.http1 import read_decompressed, stream_decompressor
from tinkex.errors import APIConnectionError, APITimeoutError, HttpRequest, UploadError

__all__ = ["PyqwestStream"]

FAILURES = (
    ConnectionError,
    pyqwest.RemoteProtocolError,
    pyqwest.ReadError,
    pyqwest.WriteError,
    pyqwest.StreamError,
)


class PyqwestStream:
    """A response of pyqwest; closing it ends the request on the server too.

    ``explain`` turns an error of pyqwest into the message of the ``APIConnectionError`` that is raised for it.
    """

    def __init__(self, about: HttpRequest, timeout: float, explain: Callable[[Exception], str]) -> None:
        self._about, self._timeout, self._explain = about, timeout, explain
        self._exit_stack = contextlib.AsyncExitStack()
        self.status = 0
        self.headers: dict[str, str] = {}
        self._chunks: AsyncIterator[bytes | memoryview | bytearray] | None = None
        self._decompressor: zlib._Decompress | None = None

    @classmethod
    async def open(
        cls, client: pyqwest.Client, base_url: str, request: Request, explain: Callable[[Exception], str]
    ) -> PyqwestStream:
        """Sends the request and returns when the headers of the response are here."""
        stream = cls(request.about(base_url), request.timeout, explain)
        query = f"?{urlencode(request.query)}" if request.query else ""
        body = _UploadBody(request.upload, request.timeout) if request.upload is not None else None
        try:
            async with stream._bounded_wait() as limit:
                if body is not None:
                    body.limit = limit
                    stream._exit_stack.callback(body.close)
                response = await stream._exit_stack.enter_async_context(
                    client.stream(
                        request.method,
                        base_url + request.path + query,
                        {**request.headers, **_content_length(request)},
                        body.chunks() if body is not None else request.body or None,
                    )
                )
        except APIConnectionError:
            await stream.close()
            if body is not None and body.failure is not None:
                raise body.failure from None
            raise
        except BaseException:
            await stream.close()
            raise
        stream.status = response.status
        stream.headers = {name.lower(): value for name, value in response.headers.items()}
        stream._chunks = aiter(response.content)
        try:
            stream._decompressor = stream_decompressor(stream.headers.get("content-encoding", "").lower())
        except ValueError as error:
            await stream.close()
            raise APIConnectionError(stream._about, f"no reply from {stream._about.url}: {error}") from error
        return stream

    async def read(self) -> bytes:
        """Returns the next chunk of the body."""
        if self._chunks is None:
            return b""
        async with self._bounded_wait():
            return await read_decompressed(self._decompressor, self._read_raw)

    async def _read_raw(self) -> bytes:
        assert self._chunks is not None
        async for chunk in self._chunks:
            if chunk:
                return bytes(chunk)
        return b""

    async def close(self) -> None:
        """Ends the request."""
        self._chunks = None
        with contextlib.suppress(OSError, pyqwest.ReadError, pyqwest.StreamError):
            await self._exit_stack.aclose()

    @contextlib.asynccontextmanager
    async def _bounded_wait(self) -> AsyncIterator[asyncio.Timeout]:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                yield limit
        except TimeoutError as error:
            raise APITimeoutError(
                self._about, f"{self._about.url} sent nothing for {self._timeout:g} s"
            ) from error
        except (EOFError, ValueError) as error:
            cause = str(error) or "it ends early"
            raise APIConnectionError(self._about, f"no reply from {self._about.url}: {cause}") from error
        except FAILURES as error:
            raise APIConnectionError(self._about, self._explain(error)) from error


class _UploadBody:
    """An upload as pyqwest reads it: chunk by chunk, whenever it can send more."""

    def __init__(self, upload: Upload, timeout: float) -> None:
        self._reader = upload.read()
        self._timeout = timeout
        self.limit: asyncio.Timeout | None = None
        self.failure: UploadError | None = None
        """Why a file could not be read; pyqwest reports only that there was an error."""

    async def chunks(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        try:
            async for chunk in self._reader:
                if self.limit is not None:
                    self.limit.reschedule(loop.time() + self._timeout)
                yield chunk
        except UploadError as error:
            self.failure = error
            raise

    def close(self) -> None:
        self.limit = None
        self._reader.close()


def _content_length(request: Request) -> dict[str, str]:
    length = None if request.upload is None else request.upload.length
    return {} if length is None else {"content-length": str(length)}
