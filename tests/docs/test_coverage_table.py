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
ALL = [f"R{number:02}" for number in [*range(1, 22), *range(30, 48)]]
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


def test_the_examples_are_counted() -> None:
    number = len(list((ROOT / "examples").glob("*.py"))) - 1
    assert ROWS["R20"]["state"] == f"done: {number} and the quickstart"


def test_all_parts_beyond_the_official_client_are_listed() -> None:
    assert len(PARTS) == 11


ITEMS, _, WEAKNESSES = (
    (DOCS / "coverage.md")
    .read_text()
    .partition("## The original, item by item")[2]
    .partition("### The original's known weaknesses")
)
ORIGINAL = [
    dict(zip(("section", "capability", "here", "state"), row.strip("| ").split(" | "), strict=True))
    for row in re.findall(r"(?m)^\| \d.*$", ITEMS)
]


def test_every_weakness_of_the_original_is_answered() -> None:
    answered: list[int] = []
    for numbers, _, answer in (
        row.strip("| ").split(" | ") for row in re.findall(r"(?m)^\| \d.*$", WEAKNESSES)
    ):
        first, *more = map(int, re.findall(r"\d+", numbers))
        answered += range(first, more[0] + 1) if "–" in numbers else (first, *more)
        assert answer
    assert answered == list(range(1, 53))


def test_every_section_of_the_original_has_rows_with_a_state() -> None:
    sections = {row["section"].partition(".")[0] for row in ORIGINAL}
    assert sections == {
        str(number) for number in (*range(1, 32), 33, 36)
    }  # 32 are the weaknesses, the others examples
    for row in ORIGINAL:
        assert re.match(r"works|differs: ", row["state"]), row


@pytest.mark.parametrize("row", ORIGINAL, ids=lambda row: f"{row['section']} {row['capability'][:30]}")
def test_what_replaces_a_capability_of_the_original_exists(row: dict[str, str]) -> None:
    import tinkex
    from tinkex.observability import events, metrics, process, telemetry

    places = [tinkex, events, metrics, telemetry, tinkex.losses.regularizers, tinkex.recovery]
    for name in re.findall(r"`([\w./]+)(?:\(.*?\))?`", row["here"]):
        if "/" in name or name.endswith(".py"):
            assert (ROOT / name).exists() or (ROOT / "src" / "tinkex" / name).exists(), name
            continue
        found: object = {"tinkex": tinkex, "types": tinkex.types, "telemetry": telemetry, "process": process}
        for part in name.split("."):
            if isinstance(found, dict):
                candidates = [place for place in places if part[0].isupper() and hasattr(place, part)]
                if part not in found and not candidates:
                    break  # a word of the prose, an argument or a setting
                found = found[part] if part in found else getattr(candidates[0], part)
            else:
                assert hasattr(found, part), name
                found = getattr(found, part)
