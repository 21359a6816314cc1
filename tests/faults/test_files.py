"""Files that block while they are uploaded do not block the rest of the program."""

from __future__ import annotations

import io
import subprocess
import sys
import threading

import pytest

import tinkex
from tests.servers import ServedEngine

PNG = b"\x89PNG\r\n\x1a\n"
MANY = 60
"""More than the loop's thread pool."""


class Blocked(io.RawIOBase):
    """A pipe that blocks until it is released."""

    def __init__(self, begun: threading.Semaphore, release: threading.Event) -> None:
        self._begun, self._release = begun, release
        self._at = 0

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        self._at += 1
        if self._at > 1:
            return b""
        self._begun.release()
        self._release.wait(120)
        return PNG


@pytest.mark.slow
def test_blocked_uploads_do_not_block_new_connections(served_engine: ServedEngine) -> None:
    begun, release = threading.Semaphore(0), threading.Event()
    # A host name, which is resolved on a thread.
    url = served_engine.url.replace("127.0.0.1", "localhost")
    rest = tinkex.RestClient(base_url=served_engine.url, api_key=served_engine.key)
    uploads = [rest.upload_asset((f"{n}.png", Blocked(begun, release))) for n in range(MANY)]
    try:
        for _ in range(MANY):
            assert begun.acquire(timeout=60)
        other = tinkex.RestClient(config=tinkex.Config(base_url=url, api_key=served_engine.key))
        assert other.get_health().result(60).status == "ok"
        assert other.upload_asset(("quick.png", PNG + b"quick")).result(60).size_bytes == len(PNG) + 5
    finally:
        release.set()
    assert {upload.result(120).size_bytes for upload in uploads} == {len(PNG)}


@pytest.mark.slow
def test_a_blocked_upload_does_not_prevent_exit(served_engine: ServedEngine) -> None:
    program = f"""
import os, threading, tinkex
reading = threading.Event()
class Never:
    def read(self, size):
        reading.set()
        threading.Event().wait()
rest = tinkex.RestClient(base_url={served_engine.url!r}, api_key={served_engine.key!r})
uploading = rest.upload_asset(("never.png", Never()))
assert reading.wait(60)
print("over")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "over\n"), ended.stderr
