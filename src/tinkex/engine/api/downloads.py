"""Downloads: addresses that anyone can fetch without a key for a while, because this server signed them.

Clients fetch them with plain HTTP and no headers. An address names what it is for, and nothing else can be reached by it:
file names come from the directory itself, never from the address.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.responses import FileResponse, Response, StreamingResponse

from tinkex.engine.api.archives import Archive
from tinkex.engine.api.auth import signer_of
from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.errors import json_response
from tinkex.engine.api.traces import trace_of
from tinkex.engine.lookup import checkpoint_of_url, find_checkpoint
from tinkex.engine.store import CheckpointKind, CheckpointRow
from tinkex.errors import Expired, InvalidInput, UnknownObject
from tinkex.types import CheckpointArchiveUrlResponse, ExternalWeightsUrlsResponse, TraceExportResponse

DOWNLOADS = "download"
LIFE_S = 3600.0
NOT_EXPORTED = frozenset({"manifest.json"})
"""Files of ours that mean nothing elsewhere."""


async def external_weights_urls(call: Call) -> Reply:
    """An address for each file of exported weights."""
    checkpoint = _checkpoint(call)
    if checkpoint.kind is not CheckpointKind.EXTERNAL_WEIGHTS:
        raise InvalidInput(
            f"{checkpoint.path} is no export; make one with save_weights_external, or fetch its archive."
        )
    directory = call.engine.store.directories.resolve(checkpoint.directory)
    expires = time.time() + LIFE_S
    urls = {
        file.name: file.as_uri()
        if call.is_embedded
        else _address(call, {**_names(call, checkpoint), "file": file.name}, file.name, expires)
        for file in _files(directory)
        if file.name not in NOT_EXPORTED
    }
    return ExternalWeightsUrlsResponse(urls=urls, expires=_moment(expires))


async def checkpoint_archive(call: Call) -> Reply:
    """The way to a checkpoint as one tar file: a redirect to an address that works for an hour."""
    checkpoint = _checkpoint(call)
    expires, name = time.time() + LIFE_S, f"{checkpoint.name}.tar"
    if call.is_embedded:
        archive = Archive(call.engine.store.directories.resolve(checkpoint.directory))
        url = _written(call, name, archive.read(0, archive.size))
    else:
        url = _address(call, {**_names(call, checkpoint), "archive": True}, name, expires)
    reply = json_response(CheckpointArchiveUrlResponse(url=url, expires=_moment(expires)), 302)
    reply.headers["location"] = url
    reply.headers["expires"] = format_datetime(_moment(expires), usegmt=True)
    return reply


async def export_session_trace(call: Call) -> Reply:
    """The way to a session's timeline, for a trace viewer."""
    session_id, name = call.parameters["session_id"], f"{call.parameters['session_id']}.json"
    trace = trace_of(call.engine.store, call.owner, session_id)
    if call.is_embedded:
        url = _written(call, name, iter([trace]))
    else:
        claims = {"owner": call.owner, "session": session_id}
        url = _address(call, claims, name, time.time() + LIFE_S)
    return TraceExportResponse(status="ready", url=url)


async def download(call: Call) -> Reply:
    """What a signed address stands for."""
    claims = signer_of(call.engine).read(DOWNLOADS, call.parameters["token"], time.time())
    if claims is None:
        raise Expired("this address was not made by this server, or its time is over; ask for a new one.")
    if "session" in claims:
        trace = trace_of(call.engine.store, claims["owner"], claims["session"])
        return Response(trace, media_type="application/json")
    checkpoint = find_checkpoint(call.engine.store, claims["owner"], claims["path"])
    if checkpoint.directory != claims["directory"]:
        raise Expired(f"{checkpoint.path} was replaced since this address was made; ask for a new one.")
    call.engine.integrity.check(checkpoint)
    directory = call.engine.store.directories.resolve(checkpoint.directory)
    if "archive" in claims:
        return _send_archive(call, Archive(directory), f"{checkpoint.name}.tar")
    file = next((file for file in _files(directory) if file.name == claims["file"]), None)
    if file is None:
        raise UnknownObject(f"{checkpoint.path} has no file {claims['file']}.")
    return FileResponse(file, media_type="application/octet-stream", filename=file.name)


def _send_archive(call: Call, archive: Archive, name: str) -> Response:
    start, stop, status = 0, archive.size, 200
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("range", ""))
    if wanted is not None:
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1 if wanted[2] else archive.size, archive.size)
        if start >= stop:
            return Response(status_code=416, headers={"content-range": f"bytes */{archive.size}"})
        status = 206
    headers = {
        "content-length": str(stop - start),
        "content-disposition": f'attachment; filename="{quote(name)}"',
        "accept-ranges": "bytes",
    }
    if status == 206:
        headers["content-range"] = f"bytes {start}-{stop - 1}/{archive.size}"
    return StreamingResponse(archive.read(start, stop), status, headers, media_type="application/x-tar")


def _checkpoint(call: Call) -> CheckpointRow:
    checkpoint = find_checkpoint(call.engine.store, call.owner, checkpoint_of_url(call.parameters))
    call.engine.integrity.check(checkpoint)
    return checkpoint


def _names(call: Call, checkpoint: CheckpointRow) -> dict[str, Any]:
    # The caller, not the owner: an address of a public checkpoint ends when it is unpublished.
    return {"owner": call.owner, "path": checkpoint.path, "directory": checkpoint.directory}


def _address(call: Call, claims: Mapping[str, Any], name: str, expires: float) -> str:
    token = signer_of(call.engine).issue(DOWNLOADS, claims, expires)
    return f"{call.origin}/api/v1/downloads/{token}/{quote(name)}"


def _written(call: Call, name: str, content: Iterator[bytes]) -> str:
    """For callers in this process, who reach no address of it: a file to read."""
    folder = call.engine.store.directories.downloads() / secrets.token_hex(8)
    folder.mkdir(mode=0o700)
    file = folder / name
    with file.open("wb") as written:
        written.writelines(content)
    return file.as_uri()


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.iterdir() if file.is_file() and not file.is_symlink())


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


HANDLERS: Mapping[str, Handler] = {
    "external_weights_urls": external_weights_urls,
    "checkpoint_archive": checkpoint_archive,
    "export_session_trace": export_session_trace,
    "download": download,
}
