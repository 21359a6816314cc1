"""One file from an address: streamed, resumed after a break, checked against what the server said of it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import json
import os
import random
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tinkex._transport.retry import Answered, Outcome, Retry, RetryPolicy, Unanswered, decide
from tinkex.config import Config
from tinkex.errors import APIConnectionError, HttpRequest, HttpResponse, SetupError, status_error

__all__ = ["MAX_BYTES", "Progress", "Source", "fetch"]

CHUNK = 1 << 20
TIMEOUT_S = 60.0
PATIENCE = RetryPolicy(total_s=300.0)
"""How long a transfer may stand still: the clock starts anew whenever bytes arrive."""
MAX_BYTES = 1 << 40
"""No file of a checkpoint is larger; a server that sends more is not followed."""
MARGIN_BYTES = 16 << 20
"""What must be left on the disk after the file is written."""
STALE = frozenset({401, 403, 404, 410})
"""What a signed address answers once its time is over."""

Progress = Callable[[str, int, int | None], None]
"""Told what is fetched, how many bytes are here, and how many there are."""


@dataclass(frozen=True)
class Source:
    """Where a file lies. ``renew`` gives a new address when this one has expired."""

    url: str
    renew: Callable[[], str] | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Known:
    """What a server has said about a file that is partly here."""

    validator: str | None
    total: int | None


def fetch(
    source: Source,
    target: Path,
    *,
    config: Config | None = None,
    progress: Progress | None = None,
    replace: bool = False,
    max_bytes: int = MAX_BYTES,
    policy: RetryPolicy = PATIENCE,
) -> int:
    """Brings the file at ``source`` to ``target`` and returns its size; ``target`` appears whole or not at all.

    What a broken transfer left in ``<target>.part`` is continued, if the server says it still has the same file.
    The proxy and certificates of ``config`` are used; the API key is not sent, as the addresses are signed.

    ::

        fetch(Source("https://example.org/adapter.tar"), Path("adapter.tar"))
    """
    if target.exists() and not replace:
        raise SetupError(f"{target} exists already; remove it, or choose another place")
    transfer = _Transfer(source, target, config or Config(), progress, max_bytes, policy)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return transfer.run()
    except OSError as error:
        raise SetupError(
            f"{target} cannot be written ({error.strerror or error}); make room, or choose another directory"
        ) from error


class _Transfer:
    """The state of one download: how many bytes are here, and what proves that they belong together."""

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
        self._notes = target.with_name(f"{target.name}.part.json")
        self._config = config
        self._opener = _opener(config)
        self._progress = progress
        self._max_bytes = max_bytes
        self._policy = policy
        self._headers: Mapping[str, str] = {}
        self._renewed = False

    def run(self) -> int:
        """Tries until the file is here, or until trying again makes no sense."""
        attempt, began = 0, time.monotonic()
        while True:
            before = self._here()
            outcome: Outcome
            try:
                self._receive()
                break
            except urllib.error.HTTPError as error:
                with error:
                    if error.code in STALE and self._source.renew is not None and not self._renewed:
                        self._url, self._renewed = self._source.renew(), True
                        continue
                    if error.code == 416:  # what is here is not a part of what is there
                        self._forget()
                        if attempt == 0:
                            attempt += 1
                            continue
                    outcome = Answered(error.code, {k.lower(): v for k, v in error.headers.items()})
                    about = HttpRequest("GET", _shown(self._url))
                    text = error.read(2000).decode("utf-8", "replace")
                    failure: Exception = status_error(
                        HttpResponse(error.code, outcome.headers, text, about), None
                    )
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                outcome = Unanswered()
                failure = APIConnectionError(
                    HttpRequest("GET", _shown(self._url)),
                    f"the transfer of {self._target.name} broke after {self._here():,} bytes: {_cause(error)}. "
                    "Run the same command again to go on from there.",
                )
            if self._here() > before:
                attempt, began, self._renewed = 0, time.monotonic(), False
            step = decide(outcome, attempt, time.monotonic() - began, self._policy, random.random)
            if not isinstance(step, Retry):
                raise failure
            attempt += 1
            time.sleep(step.after)
        num_bytes = self._here()
        self._check_content()
        self._part.replace(self._target)
        self._notes.unlink(missing_ok=True)
        return num_bytes

    def _receive(self) -> None:
        scheme = urlsplit(self._url).scheme
        if scheme == "file" and self._config.is_local:
            self._copy(Path(unquote(urlsplit(self._url).path)))
            return
        if scheme not in {"http", "https"}:
            raise SetupError(f"the server announced {_shown(self._url)}, which is no web address")
        known, here = self._known(), self._here()
        headers = {"Accept-Encoding": "identity"}
        if here and known.validator is not None:
            headers |= {"Range": f"bytes={here}-", "If-Range": known.validator}
        elif here and known.total is not None:
            headers["Range"] = f"bytes={here}-"
        elif here:
            self._forget()
            here = 0
        request = urllib.request.Request(self._url, headers=headers)  # noqa: S310 -- checked just above
        with self._opener.open(request, timeout=TIMEOUT_S) as answer:
            self._headers = {name.lower(): value for name, value in answer.headers.items()}
            start, total = _extent(answer.status, self._headers)
            if start != here or (answer.status == 206 and known.total not in {None, total}):
                self._forget()
                if start != 0:  # a part of another file; the next try asks for all of it
                    raise http.client.HTTPException("the file has changed on the server")
            if total is not None and total > self._max_bytes:
                raise SetupError(
                    f"{self._target.name} is said to have {total:,} bytes; at most {self._max_bytes:,} are taken"
                )
            self._check_room((total or 0) - start)
            self._note(Known(_validator(self._headers), total))
            with self._part.open("ab") as file:
                self._stream(answer, file, start, total)
        if total is not None and self._here() != total:
            raise http.client.IncompleteRead(b"", total - self._here())

    def _stream(self, answer: Any, file: Any, done: int, total: int | None) -> None:
        self._tell(done, total)
        # What has come is kept at once: on a slow line a full chunk would take minutes, and be lost with the line.
        while done != total and (chunk := answer.read1(CHUNK)):
            done += len(chunk)
            if done > self._max_bytes or (total is not None and done > total):
                raise SetupError(f"{self._target.name} is longer than the server said; nothing of it is kept")
            file.write(chunk)
            self._tell(done, total)

    def _copy(self, file: Path) -> None:
        """From the engine in this process: a file on the same machine."""
        total = file.stat().st_size
        self._check_room(total)
        with file.open("rb") as content, self._part.open("wb") as part:
            self._stream(content, part, 0, total)

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._part.parent).free
        if free < num_bytes + MARGIN_BYTES:
            raise SetupError(
                f"{self._target.name} needs {num_bytes:,} bytes more, and {self._part.parent} has {free:,} free; "
                "make room, or choose another directory"
            )

    def _check_content(self) -> None:
        """Compares with every checksum that is known."""
        wanted = _digests(self._headers)
        if self._source.sha256 is not None:
            wanted["sha256"] = bytes.fromhex(self._source.sha256)
        for name, digest in wanted.items():
            with self._part.open("rb") as file:
                found = hashlib.file_digest(file, name).digest()
            if found != digest:
                self._forget()
                raise SetupError(
                    f"{self._target.name} arrived damaged: its {name} is not the one the server announced. "
                    "Run the same command again to fetch it anew."
                )
        with self._part.open("rb+") as file:
            os.fsync(file.fileno())

    def _here(self) -> int:
        try:
            return self._part.stat().st_size
        except FileNotFoundError:
            return 0

    def _known(self) -> Known:
        try:
            noted = json.loads(self._notes.read_text(encoding="utf-8"))
            return Known(noted["validator"], noted["total"])
        except (OSError, ValueError, KeyError, TypeError):
            return Known(None, None)

    def _note(self, known: Known) -> None:
        self._notes.write_text(json.dumps({"validator": known.validator, "total": known.total}))

    def _forget(self) -> None:
        self._part.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)

    def _tell(self, done: int, total: int | None) -> None:
        if self._progress is not None:
            self._progress(self._target.name, done, total)


def _extent(status: int, headers: Mapping[str, str]) -> tuple[int, int | None]:
    """Where the answer starts and how long the whole file is."""
    if status == 206:
        span, _, total = headers.get("content-range", "").removeprefix("bytes ").partition("/")
        first = span.partition("-")[0]
        if not first.isdigit():
            raise http.client.HTTPException("the server sends a part without saying which")
        return int(first), int(total) if total.isdigit() else None
    length = headers.get("content-length", "")
    return 0, int(length) if length.isdigit() else None


def _validator(headers: Mapping[str, str]) -> str | None:
    """What says that it is still the same file: a strong ETag, else the time of its last change."""
    etag = headers.get("etag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("last-modified")


def _digests(headers: Mapping[str, str]) -> dict[str, bytes]:
    """The checksums of the whole file that a server or an object store sends along."""
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
            continue  # such as the "sha256-<n>" of multi-part uploads, which is of no whole file
        if len(digest) == (16 if name == "md5" else 32):
            found[name] = digest
    return found


def _opener(config: Config) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context()
    if config.ca_file is not None:
        context.load_verify_locations(cafile=str(config.ca_file))
    handlers: list[Any] = [urllib.request.HTTPSHandler(context=context)]
    if config.proxy is not None:
        if not config.proxy.startswith(("http://", "https://")):
            raise SetupError(
                f"downloads go through http and https proxies, not through {urlsplit(config.proxy).scheme}; "
                "unset TINKEX_PROXY for this command, or use another proxy"
            )
        if config.proxy_headers:
            raise SetupError(
                "downloads send no headers to proxies; put user:password@ into the proxy's address, "
                "or unset TINKEX_PROXY_HEADERS for this command"
            )
        handlers.append(urllib.request.ProxyHandler({"http": config.proxy, "https": config.proxy}))
    return urllib.request.build_opener(*handlers)


def _shown(url: str) -> str:
    """An address without what signs it."""
    parts = urlsplit(url)
    host = (parts.netloc or "").rpartition("@")[2]
    return f"{parts.scheme}://{host}/…/{parts.path.rpartition('/')[2]}"


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error) or type(error).__name__
