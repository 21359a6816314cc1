from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.checkpoints.file_server import Served, file_server
from tinkex._transport.retry import RetryPolicy
from tinkex.checkpoints import Source, fetch
from tinkex.config import Config
from tinkex.errors import APIConnectionError, NotFoundError, SetupError

CONTENT = bytes(range(256)) * 5000
QUICK = RetryPolicy(base_s=0.001, cap_s=0.001)


@pytest.fixture
def served() -> Iterator[Served]:
    with file_server(CONTENT) as server:
        yield server


def test_a_file_arrives_whole_with_progress_and_leaves_nothing_else(served: Served, tmp_path: Path) -> None:
    reported: list[tuple[str, int, int | None]] = []
    size = fetch(Source(served.url), tmp_path / "a.bin", progress=lambda *report: reported.append(report))
    assert size == len(CONTENT)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]
    assert reported[0] == ("a.bin", 0, len(CONTENT))
    assert reported[-1] == ("a.bin", len(CONTENT), len(CONTENT))


def test_an_interrupted_download_is_resumed(served: Served, tmp_path: Path) -> None:
    served.break_after = [1000, 500_000]
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert served.asked == [None, "bytes=1000-", "bytes=501000-"]


def test_a_later_call_resumes_the_download_of_an_earlier_one(served: Served, tmp_path: Path) -> None:
    served.break_after = [700_000, 0]
    with pytest.raises(APIConnectionError, match="700,000 bytes"):
        fetch(Source(served.url), tmp_path / "a", policy=RetryPolicy(max_retries=0))
    assert not (tmp_path / "a").exists()
    served.break_after = []
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert served.asked[-1] == "bytes=700000-"


def test_a_file_that_changed_meanwhile_is_downloaded_again(served: Served, tmp_path: Path) -> None:
    served.break_after = [700_000]
    with pytest.raises(APIConnectionError):
        fetch(Source(served.url), tmp_path / "a", policy=RetryPolicy(max_retries=0))
    served.content, served.etag = CONTENT[::-1], '"v2"'
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    assert (tmp_path / "a").read_bytes() == CONTENT[::-1]


def test_without_a_validator_the_size_must_be_the_same(served: Served, tmp_path: Path) -> None:
    served.etag = None
    served.break_after = [700_000]
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    assert served.asked == [None, "bytes=700000-"]
    served.break_after = [700_000]
    with pytest.raises(APIConnectionError):
        fetch(Source(served.url), tmp_path / "b", policy=RetryPolicy(max_retries=0))
    served.content = CONTENT[:-1]
    fetch(Source(served.url), tmp_path / "b", policy=QUICK)
    assert (tmp_path / "b").read_bytes() == CONTENT[:-1]


def test_a_server_without_ranges_is_read_from_the_start(served: Served, tmp_path: Path) -> None:
    served.ranges, served.break_after = False, [700_000]
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_dropped(served: Served, tmp_path: Path) -> None:
    served.break_after = [700_000]
    with pytest.raises(APIConnectionError):
        fetch(Source(served.url), tmp_path / "a", policy=RetryPolicy(max_retries=0))
    served.content = CONTENT[:1000]
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    assert (tmp_path / "a").read_bytes() == CONTENT[:1000]


def test_an_expired_url_is_renewed(served: Served, tmp_path: Path) -> None:
    renewed: list[str] = []

    def renew() -> str:
        renewed.append("now")
        return served.url

    fetch(Source(served.url.replace("/file", "/old"), renew), tmp_path / "a", policy=QUICK)
    assert renewed == ["now"]


def test_server_errors_are_retried_and_client_errors_are_not(served: Served, tmp_path: Path) -> None:
    served.statuses = [503, 500]
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    served.statuses = [404]
    with pytest.raises(NotFoundError):
        fetch(Source(served.url), tmp_path / "b", policy=QUICK)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("header", ["Content-MD5", "Repr-Digest", "x-goog-hash", "x-amz-checksum-sha256"])
def test_a_checksum_of_the_server_must_match(header: str, served: Served, tmp_path: Path) -> None:
    md5 = base64.b64encode(hashlib.md5(CONTENT).digest()).decode()
    sha = base64.b64encode(hashlib.sha256(CONTENT).digest()).decode()
    right = {
        "Content-MD5": md5,
        "Repr-Digest": f"sha-256=:{sha}:",
        "x-goog-hash": f"crc32c=AAAAAA==,md5={md5}",
        "x-amz-checksum-sha256": sha,
    }[header]
    served.headers = {header: right}
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    served.content = CONTENT[:-1] + b"!"
    with pytest.raises(SetupError, match="corrupt"):
        fetch(Source(served.url), tmp_path / "b", policy=QUICK)
    assert not list(tmp_path.glob("b*"))


def test_a_checksum_of_the_caller_must_match(served: Served, tmp_path: Path) -> None:
    fetch(Source(served.url, sha256=hashlib.sha256(CONTENT).hexdigest()), tmp_path / "a")
    with pytest.raises(SetupError, match="sha256"):
        fetch(Source(served.url, sha256="0" * 64), tmp_path / "b")


def test_a_file_over_the_limit_is_rejected_before_it_is_written(served: Served, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="the limit is 1,000"):
        fetch(Source(served.url), tmp_path / "a", max_bytes=1000)
    assert not (tmp_path / "a").exists()


def test_a_file_larger_than_the_free_space_is_rejected_before_it_is_written(
    served: Served, tmp_path: Path
) -> None:
    served.claimed_bytes = 1 << 60
    with pytest.raises(
        SetupError, match=r"needs 1,152,921,504,606,846,976 more bytes, .* free; free some space"
    ):
        fetch(Source(served.url), tmp_path / "a", max_bytes=1 << 61)
    assert not (tmp_path / "a").exists()


def test_an_existing_file_is_kept_unless_it_is_to_be_replaced(served: Served, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(SetupError, match="already exists"):
        fetch(Source(served.url), tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"
    fetch(Source(served.url), tmp_path / "a", replace=True)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_only_the_embedded_engine_may_name_files_of_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    with pytest.raises(SetupError, match="not a signed http or https URL"):
        fetch(Source(secret.as_uri()), tmp_path / "a")
    assert fetch(Source(secret.as_uri()), tmp_path / "a", config=Config(base_url="local")) == 1


def test_errors_do_not_show_the_signature_of_a_url(served: Served, tmp_path: Path) -> None:
    served.statuses = [404]
    served.path = "/secret-token/file"
    url = served.url.replace("/file", "/secret-token/file")
    with pytest.raises(NotFoundError) as raised:
        fetch(Source(url + "?signature=abc"), tmp_path / "a", policy=QUICK)
    assert "secret-token" not in repr(raised.value.request)
    assert "abc" not in repr(raised.value.request)
