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
    told: list[tuple[str, int, int | None]] = []
    size = fetch(Source(served.url), tmp_path / "a.bin", progress=lambda *news: told.append(news))
    assert size == len(CONTENT)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]
    assert told[0] == ("a.bin", 0, len(CONTENT))
    assert told[-1] == ("a.bin", len(CONTENT), len(CONTENT))


def test_a_broken_transfer_goes_on_where_it_stopped(served: Served, tmp_path: Path) -> None:
    served.break_after = [1000, 500_000]
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert served.asked == [None, "bytes=1000-", "bytes=501000-"]


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(served: Served, tmp_path: Path) -> None:
    served.break_after = [700_000, 0]
    with pytest.raises(APIConnectionError, match="700,000 bytes"):
        fetch(Source(served.url), tmp_path / "a", policy=RetryPolicy(max_retries=0))
    assert not (tmp_path / "a").exists()
    served.break_after = []
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert served.asked[-1] == "bytes=700000-"


def test_a_file_that_changed_meanwhile_is_fetched_anew(served: Served, tmp_path: Path) -> None:
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


def test_an_expired_address_is_renewed(served: Served, tmp_path: Path) -> None:
    renewed: list[str] = []

    def renew() -> str:
        renewed.append("now")
        return served.url

    fetch(Source(served.url.replace("/file", "/old"), renew), tmp_path / "a", policy=QUICK)
    assert renewed == ["now"]


def test_failures_of_the_server_are_tried_again_and_refusals_are_not(served: Served, tmp_path: Path) -> None:
    served.statuses = [503, 500]
    fetch(Source(served.url), tmp_path / "a", policy=QUICK)
    served.statuses = [404]
    with pytest.raises(NotFoundError):
        fetch(Source(served.url), tmp_path / "b", policy=QUICK)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("header", ["Content-MD5", "Repr-Digest", "x-goog-hash", "x-amz-checksum-sha256"])
def test_a_checksum_that_the_server_sends_must_fit(header: str, served: Served, tmp_path: Path) -> None:
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
    with pytest.raises(SetupError, match="damaged"):
        fetch(Source(served.url), tmp_path / "b", policy=QUICK)
    assert not list(tmp_path.glob("b*"))


def test_a_checksum_that_the_caller_knows_must_fit(served: Served, tmp_path: Path) -> None:
    fetch(Source(served.url, sha256=hashlib.sha256(CONTENT).hexdigest()), tmp_path / "a")
    with pytest.raises(SetupError, match="sha256"):
        fetch(Source(served.url, sha256="0" * 64), tmp_path / "b")


def test_too_much_is_refused_before_it_is_written(served: Served, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="at most 1,000"):
        fetch(Source(served.url), tmp_path / "a", max_bytes=1000)
    assert not (tmp_path / "a").exists()


def test_more_than_the_disk_has_room_for_is_refused_before_it_is_written(
    served: Served, tmp_path: Path
) -> None:
    served.claimed_bytes = 1 << 60
    with pytest.raises(SetupError, match=r"needs 1,152,921,504,606,846,976 bytes .* free; make room"):
        fetch(Source(served.url), tmp_path / "a", max_bytes=1 << 61)
    assert not (tmp_path / "a").exists()


def test_a_file_that_is_there_is_kept_unless_told_otherwise(served: Served, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(SetupError, match="exists already"):
        fetch(Source(served.url), tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"
    fetch(Source(served.url), tmp_path / "a", replace=True)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_only_the_engine_in_this_process_may_point_to_files_of_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    with pytest.raises(SetupError, match="no web address"):
        fetch(Source(secret.as_uri()), tmp_path / "a")
    assert fetch(Source(secret.as_uri()), tmp_path / "a", config=Config(base_url="local")) == 1


def test_errors_do_not_show_what_signs_an_address(served: Served, tmp_path: Path) -> None:
    served.statuses = [404]
    served.path = "/secret-token/file"
    url = served.url.replace("/file", "/secret-token/file")
    with pytest.raises(NotFoundError) as raised:
        fetch(Source(url + "?signature=abc"), tmp_path / "a", policy=QUICK)
    assert "secret-token" not in repr(raised.value.request)
    assert "abc" not in repr(raised.value.request)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"proxy": "socks5://127.0.0.1:9"}, "not through socks5"),
        ({"proxy": "http://127.0.0.1:9", "proxy_headers": {"x-team": "a"}}, "no headers to proxies"),
    ],
)
def test_proxies_that_downloads_cannot_use_are_refused(
    settings: dict[str, object], said: str, tmp_path: Path
) -> None:
    config = Config(base_url="http://127.0.0.1:9", api_key="tml-x", **settings)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=said):
        fetch(Source("http://127.0.0.1:9/file"), tmp_path / "a", config=config)
