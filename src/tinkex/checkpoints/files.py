"""Downloads one file from a signed URL: streamed to disk, resumed after an interruption, verified by checksum."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote, urlsplit

from tinkex._runtime import background
from tinkex._transport.retry import ErrorStatus, NoReply, Outcome, Retry, RetryPolicy, decide
from tinkex._transport.signed_urls import SignedUrls, shown_url
from tinkex.config import Config
from tinkex.errors import APIConnectionError, APIStatusError, HttpRequest, SetupError

if TYPE_CHECKING:
    from tinkex._transport.call_stream import CallStream

__all__ = ["MAX_BYTES", "Progress", "Source", "fetch", "local_file"]

MAX_BYTES = 1 << 40
"""The default size limit of a file; a server that sends more is not read any further."""
MIN_FREE_BYTES = 16 << 20
"""How much of the disk must stay free after the download."""
EXPIRED = frozenset({401, 403, 404, 410})
"""Statuses of a signed URL that is no longer valid."""

Progress = Callable[[str, int, int | None], None]
"""Called with the name of the file, the bytes downloaded and the total, if that is known."""


@dataclass(frozen=True)
class Source:
    """The URL of a file. ``renew`` returns a new URL when this one has expired."""

    url: str
    renew: Callable[[], str] | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class _PartState:
    """What identifies the remote file that a partial download belongs to."""

    validator: str | None
    total: int | None


class _Interrupted(Exception):
    """The response ended early, or does not continue the partial download; the next attempt may succeed."""


def fetch(
    source: Source,
    target: Path,
    *,
    config: Config | None = None,
    progress: Progress | None = None,
    replace: bool = False,
    max_bytes: int = MAX_BYTES,
    policy: RetryPolicy | None = None,
) -> int:
    """Downloads the file at ``source`` to ``target`` and returns its size; ``target`` appears complete or not at all.

    A partial download in ``<target>.part`` is resumed if the server still has the same file. Proxy, certificates,
    timeout and retries are those of ``config``; its API key is not sent, because the URL is signed. ``policy`` replaces
    the retries of ``config``; its clock restarts whenever bytes arrive. ``replace`` permits an existing ``target``; a file of more
    than ``max_bytes`` is rejected. ``progress`` is called with the name of a file, its bytes so far and its size, if known.

    ::

        fetch(Source("https://example.org/adapter.tar"), Path("adapter.tar"))
    """
    if target.exists() and not replace:
        raise SetupError(f"{target} already exists; remove it, or choose another path")
    config = config or Config()
    download = _Download(
        source, target, config, progress, max_bytes, policy or RetryPolicy(max_retries=config.max_retries)
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return download.run()
    except OSError as error:
        raise SetupError(
            f"{target} cannot be written ({error.strerror or error}); free some space, or choose another directory"
        ) from error


def local_file(url: str, config: Config) -> Path | None:
    """The file that a URL of the embedded engine names; None for every other URL.

    Only the engine in this process may name files of this machine: those of another server would be ours.
    """
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" and config.is_local else None


class _Download:
    """One download: the bytes on disk, and what proves that they belong to the same remote file."""

    def __init__(
        self,
        source: Source,
        target: Path,
        config: Config,
        progress: Progress | None,
        max_bytes: int,
        policy: RetryPolicy,
    ) -> None:
        self._source, self._url = source, source.url
        self._target = target
        self._part = target.with_name(f"{target.name}.part")
        self._state_file = target.with_name(f"{target.name}.part.json")
        self._config = config
        self._urls = SignedUrls(config)
        self._progress = progress
        self._max_bytes = max_bytes
        self._policy = policy
        self._headers: Mapping[str, str] = {}
        self._renewed = False

    def run(self) -> int:
        """Downloads until the file is complete, or no further attempt is worthwhile."""
        try:
            self._download()
        finally:
            background().run(self._urls.close())
        num_bytes = self._part_bytes()
        self._verify()
        self._part.replace(self._target)
        self._state_file.unlink(missing_ok=True)
        return num_bytes

    def _download(self) -> None:
        attempt, began = 0, time.monotonic()
        while True:
            before = self._part_bytes()
            outcome: Outcome
            failure: Exception
            try:
                return self._receive(attempt)
            except APIStatusError as error:
                if error.status_code in EXPIRED and self._source.renew is not None and not self._renewed:
                    self._url, self._renewed = self._source.renew(), True
                    continue
                if error.status_code == 416:  # the partial download does not belong to this file
                    self._discard()
                    if attempt == 0:
                        attempt += 1
                        continue
                outcome, failure = ErrorStatus(error.status_code, error.response.headers), error
            except (APIConnectionError, _Interrupted) as error:
                outcome = NoReply()
                failure = APIConnectionError(
                    HttpRequest("GET", shown_url(self._url)),
                    f"the download of {self._target.name} was interrupted after {self._part_bytes():,} bytes: {error}. "
                    "Run the same command again to resume it.",
                )
                failure.__cause__ = error
            if self._part_bytes() > before:
                attempt, began, self._renewed = 0, time.monotonic(), False
            step = decide(outcome, attempt, time.monotonic() - began, self._policy, random.random)
            if not isinstance(step, Retry):
                raise failure
            attempt += 1
            time.sleep(step.after)

    def _receive(self, attempt: int) -> None:
        """Requests the file, or what is missing of it, and appends the response to the partial download."""
        file = local_file(self._url, self._config)
        if file is not None:
            self._copy(file)
            return
        state, offset = self._read_state(), self._part_bytes()
        headers: dict[str, str] = {}
        if offset and state.validator is not None:
            headers = {"range": f"bytes={offset}-", "if-range": state.validator}
        elif offset and state.total is not None:
            headers = {"range": f"bytes={offset}-"}
        elif offset:
            self._discard()
            offset = 0
        loop = background()
        stream = loop.run(self._urls.open(self._url, headers=headers, attempt=attempt))
        try:
            self._headers = stream.headers
            start, total = _extent(stream.status, self._headers)
            if start != offset or (stream.status == 206 and state.total not in {None, total}):
                self._discard()
                if start != 0:  # a part of another file; the next attempt requests all of it
                    raise _Interrupted("the file has changed on the server")
            if total is not None and total > self._max_bytes:
                raise SetupError(
                    f"{self._target.name} has {total:,} bytes according to the server; the limit is {self._max_bytes:,}"
                )
            self._check_free_space((total or 0) - start)
            self._write_state(_PartState(_validator(self._headers), total))
            with self._part.open("ab") as part:
                self._append(stream, part, start, total)
        finally:
            loop.run(stream.close())
        if total is not None and self._part_bytes() != total:
            raise _Interrupted(f"{total - self._part_bytes():,} bytes are missing")

    def _append(self, stream: CallStream, part: BinaryIO, done: int, total: int | None) -> None:
        self._report(done, total)
        while done != total and (chunk := background().run(stream.read())):
            done += len(chunk)
            if done > self._max_bytes or (total is not None and done > total):
                raise SetupError(f"{self._target.name} is longer than the server announced; it was discarded")
            part.write(chunk)
            part.flush()  # what has arrived survives an interruption, on a slow connection too
            self._report(done, total)

    def _copy(self, file: Path) -> None:
        """Copies a file of the engine in this process."""
        total = file.stat().st_size
        self._check_free_space(total)
        self._report(0, total)
        shutil.copyfile(file, self._part)
        self._report(total, total)

    def _check_free_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._part.parent).free
        if free < num_bytes + MIN_FREE_BYTES:
            raise SetupError(
                f"{self._target.name} needs {num_bytes:,} more bytes, and {self._part.parent} has {free:,} free; "
                "free some space, or choose another directory"
            )

    def _verify(self) -> None:
        """Compares the file with every known checksum, and flushes it to disk."""
        expected = _digests(self._headers)
        if self._source.sha256 is not None:
            expected["sha256"] = bytes.fromhex(self._source.sha256)
        for name, digest in expected.items():
            with self._part.open("rb") as file:
                found = hashlib.file_digest(file, name).digest()
            if found != digest:
                self._discard()
                raise SetupError(
                    f"{self._target.name} is corrupt: its {name} is not the one the server announced. "
                    "Run the same command again to download it again."
                )
        with self._part.open("rb+") as file:
            os.fsync(file.fileno())

    def _part_bytes(self) -> int:
        try:
            return self._part.stat().st_size
        except FileNotFoundError:
            return 0

    def _read_state(self) -> _PartState:
        try:
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
            return _PartState(state["validator"], state["total"])
        except (OSError, ValueError, KeyError, TypeError):
            return _PartState(None, None)

    def _write_state(self, state: _PartState) -> None:
        self._state_file.write_text(json.dumps({"validator": state.validator, "total": state.total}))

    def _discard(self) -> None:
        self._part.unlink(missing_ok=True)
        self._state_file.unlink(missing_ok=True)

    def _report(self, done: int, total: int | None) -> None:
        if self._progress is not None:
            self._progress(self._target.name, done, total)


def _extent(status: int, headers: Mapping[str, str]) -> tuple[int, int | None]:
    """Where the response starts in the file, and the size of the whole file."""
    if status == 206:
        span, _, total = headers.get("content-range", "").removeprefix("bytes ").partition("/")
        first = span.partition("-")[0]
        if not first.isdigit():
            raise _Interrupted("the server sent a part without its range")
        return int(first), int(total) if total.isdigit() else None
    length = headers.get("content-length", "")
    return 0, int(length) if length.isdigit() else None


def _validator(headers: Mapping[str, str]) -> str | None:
    """What identifies the version of a file: a strong ETag, else the time of its last modification."""
    etag = headers.get("etag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("last-modified")


def _digests(headers: Mapping[str, str]) -> dict[str, bytes]:
    """The checksums of the whole file in the headers of a server or an object store."""
    found: dict[str, bytes] = {}
    named = [("md5", headers.get("content-md5", "")), ("sha256", headers.get("x-amz-checksum-sha256", ""))]
    for header in ("digest", "repr-digest", "x-goog-hash"):
        for item in headers.get(header, "").split(","):
            name, _, value = item.strip().partition("=")
            named.append((name.lower().replace("sha-256", "sha256"), value.strip(":")))
    for name, value in named:
        if name not in {"md5", "sha256"} or not value:
            continue
        try:
            digest = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            continue  # such as the "sha256-<n>" of multi-part uploads, which is not a checksum of the whole file
        if len(digest) == (16 if name == "md5" else 32):
            found[name] = digest
    return found
