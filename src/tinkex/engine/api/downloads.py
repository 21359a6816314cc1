"""Downloads: URLs that this server signs, and that anyone can fetch without a key until they expire or the key is revoked.

Clients fetch them without any headers. A URL is valid for one file only: file names come from the directory itself,
never from the URL. Callers in this process, who cannot fetch a URL of it, get the URLs of files on disk.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.responses import FileResponse, Response, StreamingResponse

from tinkex.engine.api.archives import Archive
from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.errors import json_response
from tinkex.engine.api.signed_urls import read_claims, sign_url
from tinkex.engine.api.traces import trace_of
from tinkex.engine.lookup import checkpoint_of_url, find_checkpoint
from tinkex.engine.quotas import check_new_bytes
from tinkex.engine.store import MANIFEST_FILE, CheckpointKind, CheckpointRow
from tinkex.errors import Expired, InvalidInput, UnknownObject
from tinkex.types import CheckpointArchiveUrlResponse, ExternalWeightsUrlsResponse, TraceExportResponse

PURPOSE = "download"
URL_TTL_S = 3600.0


async def external_weights_urls(call: Call) -> Reply:
    """A URL for each file of exported weights."""
    checkpoint = _checkpoint(call)
    if checkpoint.kind is not CheckpointKind.EXTERNAL_WEIGHTS:
        raise InvalidInput(
            f"{checkpoint.path} is not an export; make one with save_weights_external, or fetch its archive."
        )
    directory = call.engine.store.directories.resolve(checkpoint.directory)
    expires = time.time() + URL_TTL_S
    urls = {
        file.name: file.as_uri()
        if call.is_embedded
        else _signed_url(call, {**_claims(call, checkpoint), "file": file.name}, file.name, expires)
        for file in _files(directory)
        if file.name != MANIFEST_FILE  # it means nothing outside of this server
    }
    return ExternalWeightsUrlsResponse(urls=urls, expires=_datetime(expires))


async def checkpoint_archive(call: Call) -> Reply:
    """A redirect to a checkpoint as one tar file, by a URL that is valid for an hour."""
    checkpoint = _checkpoint(call)
    expires, name = time.time() + URL_TTL_S, f"{checkpoint.name}.tar"
    if call.is_embedded:
        archive = Archive(call.engine.store.directories.resolve(checkpoint.directory))
        try:
            url = await _write_file(call, name, archive.size, archive.write)
        except (FileNotFoundError, EOFError) as error:
            raise Expired(f"{checkpoint.path} was deleted while its archive was being written.") from error
    else:
        url = _signed_url(call, {**_claims(call, checkpoint), "archive": True}, name, expires)
    reply = json_response(CheckpointArchiveUrlResponse(url=url, expires=_datetime(expires)), 302)
    reply.headers["location"] = url
    reply.headers["expires"] = format_datetime(_datetime(expires), usegmt=True)
    return reply


async def export_session_trace(call: Call) -> Reply:
    """A URL of a session's timeline, for a trace viewer."""
    session_id, name = call.parameters["session_id"], f"{call.parameters['session_id']}.json"
    trace = await call.run_on_thread(lambda: trace_of(call.engine.store, call.owner, session_id))
    if call.is_embedded:
        url = await _write_file(call, name, len(trace), lambda file: file.write_bytes(trace))
    else:
        claims = {"owner": call.owner, "session": session_id}
        url = _signed_url(call, claims, name, time.time() + URL_TTL_S)
    return TraceExportResponse(status="ready", url=url)


async def download(call: Call) -> Reply:
    """The file behind a signed URL."""
    claims = read_claims(call.engine, PURPOSE, call.parameters["token"])
    if "session" in claims:
        trace = await call.engine.run_on_thread(
            claims["owner"], lambda: trace_of(call.engine.store, claims["owner"], claims["session"])
        )
        return Response(trace, media_type="application/json")
    checkpoint = find_checkpoint(call.engine.store, claims["owner"], claims["path"])
    if checkpoint.directory != claims["directory"]:
        raise Expired(f"{checkpoint.path} was replaced since this URL was signed; request a new one.")
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
    requested = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("range", ""))
    if requested is not None:
        start = int(requested[1])
        stop = min(int(requested[2]) + 1 if requested[2] else archive.size, archive.size)
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


def _claims(call: Call, checkpoint: CheckpointRow) -> dict[str, Any]:
    # The caller, not the owner: a URL of a public checkpoint is invalid once that is unpublished.
    return {"owner": call.owner, "path": checkpoint.path, "directory": checkpoint.directory}


def _signed_url(call: Call, claims: Mapping[str, Any], name: str, expires: float) -> str:
    return sign_url(call, PURPOSE, claims, name, expires, call.origin)


async def _write_file(call: Call, name: str, size: int, write: Callable[[Path], object]) -> str:
    """Writes a file for a caller in this process and returns its URL; in a thread, because it is the caller's loop."""
    store = call.engine.store
    # Earlier downloads count: they are deleted after the retention time of results.
    check_new_bytes(call.engine.config, store, call.owner, size + store.directories.downloads_bytes())
    folder = store.directories.downloads() / secrets.token_hex(8)
    folder.mkdir(mode=0o700)
    file = folder / name
    try:
        await asyncio.to_thread(write, file)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return file.as_uri()


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.iterdir() if file.is_file() and not file.is_symlink())


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


HANDLERS: Mapping[str, Handler] = {
    "external_weights_urls": external_weights_urls,
    "checkpoint_archive": checkpoint_archive,
    "export_session_trace": export_session_trace,
    "download": download,
}
