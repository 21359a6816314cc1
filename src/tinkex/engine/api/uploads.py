"""Uploads of external weights: a signed URL per file, PUTs that can be resumed, and the checkpoint at the end.

A PUT whose connection broke off is resumed as in Google Cloud Storage: an empty PUT with ``Content-Range: bytes */<total>``
returns 308 and ``Range: bytes=0-<last>`` with what the server has, and one with ``Content-Range: bytes <first>-<last>/<total>``
sends the rest. What follows ``<first>`` is replaced: bytes of the broken connection may arrive after that reply.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from starlette.responses import Response

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.errors import json_response
from tinkex.engine.api.limits import MAX_TEXT_BYTES, check_stored_size
from tinkex.engine.api.loopback import loopback_origin
from tinkex.engine.api.signed_urls import read_claims, sign_url
from tinkex.engine.lanes.import_files import FILES
from tinkex.engine.store import UploadFileRow
from tinkex.errors import InvalidInput, Unsupported
from tinkex.types import ExternalWeightsUploadFinishResponse, ExternalWeightsUploadStartResponse

PURPOSE = "upload"
RESUME_INCOMPLETE = 308


class Extent(NamedTuple):
    """Where the content of a PUT starts in its file (None: it only requests the state), and the size of the file."""

    first: int | None
    total: int | None


async def external_weights_upload_start(call: Call) -> Reply:
    """Start an upload; returns its id, and a URL to PUT each file to."""
    for field in ("base_model", "destination_project_id"):
        check_stored_size(field, getattr(call.request, field), MAX_TEXT_BYTES)
    upload = await asyncio.to_thread(call.engine.uploads.start, call.owner, call.request)
    await call.engine.flushed()
    call.audit_details.update(upload_id=upload.upload_id)
    origin = await asyncio.to_thread(loopback_origin, call.engine) if call.is_embedded else call.origin
    claims = {"owner": call.owner, "upload": upload.upload_id}
    return ExternalWeightsUploadStartResponse(
        upload_id=upload.upload_id,
        urls={
            name: sign_url(call, PURPOSE, {**claims, "file": name}, name, upload.expires_at, origin)
            for name in FILES
        },
        expires=datetime.fromtimestamp(int(upload.expires_at), UTC),
    )


async def upload_file(call: Call) -> Reply:
    """Receive a file, or the rest of one, while it arrives."""
    assert call.body_stream is not None
    claims = read_claims(call.engine, PURPOSE, call.parameters["token"])
    uploads, name = call.engine.uploads, claims["file"]
    upload = uploads.find(claims["owner"], claims["upload"])
    if call.headers.get("content-encoding", "identity").strip().lower() not in {"", "identity"}:
        raise Unsupported("files of weights are stored as they are sent; send them without Content-Encoding.")
    extent = _extent(call.headers)
    received = await asyncio.to_thread(uploads.received, upload, name)
    if extent.first is None or extent.first > received.received_bytes:
        return _state(received)
    # On threads: writing and flushing would block the event loop.
    writer = await asyncio.to_thread(uploads.open, upload, name, extent.first, extent.total)
    try:
        async for chunk in call.body_stream:
            await asyncio.to_thread(writer.write, chunk)
        writer.finish()
    finally:
        await asyncio.to_thread(uploads.close, writer)
    await call.engine.flushed()
    return _state(await asyncio.to_thread(uploads.received, upload, name))


async def external_weights_upload_finish(call: Call) -> Reply:
    """Validate the files and turn them into a checkpoint; returns its path."""
    path = await call.run_on_thread(partial(call.engine.uploads.finish, call.owner, call.request.upload_id))
    await call.engine.flushed()
    call.audit_details.update(tinker_path=path, model_id=path.removeprefix("tinker://").split("/")[0])
    return ExternalWeightsUploadFinishResponse(tinker_path=path)


async def external_weights_upload_cancel(call: Call) -> Reply:
    """Delete an unfinished upload and its files."""
    await asyncio.to_thread(call.engine.uploads.cancel, call.owner, call.request.upload_id)
    await call.engine.flushed()
    return None


def _extent(headers: Mapping[str, str]) -> Extent:
    """Returns the part of the file that a request carries; raises ``InvalidInput`` for a range that is not one.

    >>> _extent({"content-length": "5"})
    Extent(first=0, total=5)
    >>> _extent({"content-length": "2", "content-range": "bytes 3-4/5"})
    Extent(first=3, total=5)
    >>> _extent({"content-range": "bytes */5"})
    Extent(first=None, total=5)
    """
    length = headers.get("content-length", "")
    size = int(length) if length.isdigit() else None
    text = headers.get("content-range")
    if text is None:
        return Extent(0, size)
    found = re.fullmatch(r"bytes (?:(\d{1,15})-(\d{1,15})|\*)/(\d{1,15})", text.strip())
    if found is None:
        raise InvalidInput(
            f"Content-Range is {text[:100]!r}; use 'bytes <first>-<last>/<total>', or 'bytes */<total>' with an empty body."
        )
    total = int(found[3])
    if found[1] is None:
        return Extent(None, total)
    first, last = int(found[1]), int(found[2])
    if not first <= last < total or (size is not None and size != last + 1 - first):
        raise InvalidInput(f"Content-Range {text!r} does not fit its body of {length or 'unknown'} bytes.")
    return Extent(first, total)


def _state(file: UploadFileRow) -> Response:
    """What the server has of a file: 200 if it is complete, else 308; as a range if there is anything."""
    response = json_response({}, 200 if file.is_complete else RESUME_INCOMPLETE)
    if file.received_bytes:
        response.headers["range"] = f"bytes=0-{file.received_bytes - 1}"
    return response


HANDLERS: Mapping[str, Handler] = {
    "external_weights_upload_start": external_weights_upload_start,
    "external_weights_upload_finish": external_weights_upload_finish,
    "external_weights_upload_cancel": external_weights_upload_cancel,
    "upload_file": upload_file,
}
