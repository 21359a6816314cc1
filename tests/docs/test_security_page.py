"""docs/security.md names tests, settings and sections that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tinkex.cli.server_settings import SETTINGS, flag_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
OPTIONS = {flag_of(name) for name in SETTINGS}
QUOTED = sorted(set(re.findall(r"`([^`]+)`", PAGE)))


@pytest.mark.parametrize("path", [name for name in QUOTED if name.startswith("tests/")])
def test_a_test_of_the_page_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", [name for name in QUOTED if re.fullmatch(r"--[a-z-]+|max_\w+|\w+_s", name)])
def test_a_setting_of_the_page_exists(name: str) -> None:
    assert name in SETTINGS or name in OPTIONS


def test_every_resource_has_a_bound_and_every_claim_a_test() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    assert all(len(row) in {2, 3} and row[1].strip(" |") for row in rows)


def test_the_policy_links_to_the_page() -> None:
    assert "(docs/security.md)" in (ROOT / "SECURITY.md").read_text()
