"""The changelog stays short, grouped and ready to become release notes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tinkex import __version__

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"(?ms)^## \[([^\]]+)\](?: - \S+)?\n(.*?)(?=^## |\Z)", CHANGELOG))
GROUPS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def release_notes(tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "release-notes"), tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_versions_are_dated_and_the_newest_comes_first() -> None:
    headings = re.findall(r"(?m)^## (.*)$", CHANGELOG)
    if headings[0] == "[Unreleased]":
        del headings[0]
    dates = [re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings]
    assert all(dates), headings
    assert sorted(headings, reverse=True) == headings


@pytest.mark.parametrize("version", SECTIONS)
def test_a_section_is_grouped_and_each_change_is_one_line(version: str) -> None:
    text = SECTIONS[version]
    assert set(re.findall(r"(?m)^### (.*)$", text)) <= GROUPS
    assert not re.search(r"(?m)^[ \t]+\S", text), "a change continues on a second line"
    assert len(text.split()) < 700, "a user reads it in two minutes"


def test_the_release_notes_are_the_section_of_the_version() -> None:
    notes = release_notes(f"v{__version__}")
    assert notes.returncode == 0, notes.stderr
    assert notes.stdout.strip() == SECTIONS[__version__].strip()


def test_a_tag_of_another_version_has_no_release_notes() -> None:
    notes = release_notes("v99.0.0")
    assert (notes.returncode, notes.stdout) == (1, "")
    assert f"tag v{__version__}" in notes.stderr
