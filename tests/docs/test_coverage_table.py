"""docs/coverage.md has a row for every requirement, and every row names existing modules, tests and examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.page_program import BLOCK

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COLUMNS = ("requirement", "module", "test", "example", "state")
ROWS = {
    match[1]: dict(zip(COLUMNS, match[2].strip(" |").split(" | "), strict=True))
    for match in re.finditer(r"^\| (R\d\d) \|(.*)$", (DOCS / "coverage.md").read_text(), re.MULTILINE)
}
ALL = [f"R{number:02}" for number in [*range(1, 22), *range(30, 41)]]
MISSING = "missing"


def test_there_is_a_row_for_every_requirement() -> None:
    assert list(ROWS) == ALL


@pytest.mark.parametrize("name", ALL)
def test_everything_a_row_names_exists(name: str) -> None:
    row = ROWS[name]
    for column in ("module", "test", "example"):
        named = re.findall(r"`([\w./-]+)`", row[column])
        linked = re.findall(r"\]\(([^)#]+)", row[column])
        assert named or linked or row[column] == MISSING, f"{column} names nothing"
        for path in named:
            assert (ROOT / path).exists() or (ROOT / "src" / "tinkex" / path).exists(), path
        for path in linked:
            assert (DOCS / path).exists(), path
    assert all(path.startswith("tests/") for path in re.findall(r"`([\w./-]+)`", row["test"]))


@pytest.mark.parametrize("name", ALL)
def test_a_done_row_has_a_module_a_test_and_documentation(name: str) -> None:
    row = ROWS[name]
    assert re.match(r"done|partly|missing", row["state"]), row["state"]
    if row["state"].startswith("done"):
        assert MISSING not in (row["module"], row["test"], row["example"])


PARTS = re.findall(r"^\| ([A-Z][\w ,]+) \| (\[.*)$", (DOCS / "coverage.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("part", "rest"), PARTS, ids=[part for part, _ in PARTS])
def test_every_part_has_a_page_with_an_example_and_tests_that_exist(part: str, rest: str) -> None:
    guide, both, faults = rest.strip(" |").split(" | ")
    pages = re.findall(r"\]\(([^)#]+)", guide)
    assert pages, part
    assert all(BLOCK.search((DOCS / page).read_text()) for page in pages)
    for path in re.findall(r"`([\w./-]+)`", both + faults):
        assert (ROOT / path).exists(), path
    assert "`tests/contract" in both
    assert faults


def test_all_parts_beyond_the_official_client_are_listed() -> None:
    assert len(PARTS) == 11
