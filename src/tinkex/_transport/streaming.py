"""Responses that are read while they arrive, and requests whose body is read while it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from tinkex._transport.base import Reply, Request, Transport, Upload
from tinkex.errors import APIConnectionError, APITimeoutError

__all__ = ["ResponseStream", "StreamingTransport", "open_stream", "send_upload"]

MAX_UPLOAD_REPLY_BYTES = 64 * 1024 * 1024


class ResponseStream(Protocol):
    """A response whose body is still arriving."""

    @property
    def status(self) -> int:
        """The status code."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers; names are in lower case."""
        ...

    async def read(self) -> bytes:
        """Returns the next chunk, empty at the end; raises ``APIConnectionError`` if the body breaks off or stalls."""
        ...

    async def close(self) -> None:
        """Closes the stream and its connection; the server sees a disconnect."""
        ...


@runtime_checkable
class StreamingTransport(Protocol):
    """A transport that can return a response before its body is complete."""

    async def stream(self, request: Request) -> ResponseStream:
        """Sends a request and returns when the headers of the response are here; ``timeout`` bounds each wait for data."""
        ...


async def open_stream(transport: Transport, request: Request) -> ResponseStream:
    """Returns the response as a stream; a transport that cannot stream delivers the body in one chunk."""
    if isinstance(transport, StreamingTransport):
        return await transport.stream(request)
    if request.upload is not None:
        request = replace(request, body=await _read_all(request.upload), upload=None)
    return _BufferedStream(await transport.send(request))


async def send_upload(transport: Transport, request: Request) -> Reply:
    """Sends a request with an upload and returns the whole reply; an early reply stops the upload."""
    stream = await open_stream(transport, request)
    try:
        body = bytearray()
        try:
            async with asyncio.timeout(request.timeout):
                while chunk := await stream.read():
                    body += chunk
                    if len(body) > MAX_UPLOAD_REPLY_BYTES:
                        raise APIConnectionError(
                            request.about(""), f"the reply to {request.path} does not end"
                        )
        except (APIConnectionError, TimeoutError) as error:
            # A server that rejects an upload early may close the connection before its body is through; its status is.
            if stream.status < 400:
                if isinstance(error, APIConnectionError):
                    raise
                message = f"the reply to {request.path} was not complete within {request.timeout:g} s"
                raise APITimeoutError(request.about(""), message) from error
        return Reply(stream.status, stream.headers, bytes(body))
    finally:
        await stream.close()


async def _read_all(upload: Upload) -> bytes:
    reader = upload.read()
    try:
        return b"".join([chunk async for chunk in reader])
    finally:
        reader.close()


class _BufferedStream:
    """A complete reply as a stream."""

    def __init__(self, reply: Reply) -> None:
        self.status, self.headers, self._body = reply.status, reply.headers, reply.body

    async def read(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def close(self) -> None:
        self._body = b""
