from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.cli import output as official

from tinkex.cli.render import as_json, or_missing, print_table, relative_time, size, yes_no


@given(st.integers(-5, 1 << 62))
def test_sizes_are_formatted_like_the_official_program(num_bytes: int) -> None:
    assert size(num_bytes) == official.format_size(num_bytes)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "seconds", [5, 45, 90, 150, 3000, 3700, 7300, 80_000, 90_000, 200_000, 600_000, 700_000, 1_500_000, 2_600_000, 9_000_000]
)  # fmt: skip
def test_times_are_formatted_like_the_official_program(seconds: int, sign: int) -> None:
    # Half a second off the boundary, because the official function reads the clock itself.
    when = datetime.now(UTC) - timedelta(seconds=sign * (seconds + 0.5))
    assert relative_time(when) == official.format_timestamp(when)


def test_missing_values_are_formatted_as_not_available() -> None:
    assert relative_time(None) == size(None) == or_missing(None) == or_missing("") == yes_no(None) == "N/A"
    assert relative_time(None, missing="Never") == "Never"
    assert [yes_no(value) for value in (True, False)] == ["Yes", "No"]
    assert relative_time(datetime.fromisoformat("2020-01-02")) == "2020-01-02"


def test_narrow_terminals_get_blocks_with_unwrapped_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "tinker://0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f:train:0/weights/final"
    monkeypatch.setenv("COLUMNS", "50")
    print_table(["ID", "Type", "Path"], [["weights/final", "training", path], ["x", "sampler", path]], "Two")
    printed = capsys.readouterr().out
    assert printed.splitlines()[:5] == ["Two", "", "ID    weights/final", "Type  training", f"Path  {path}"]
    print_table(["Property", "Value"], [["Tinker Path", path], ["Size", "1 B"]])
    assert capsys.readouterr().out == f"Tinker Path  {path}\nSize         1 B\n"
    print_table(["ID", "Type"], [["a", "training"]])
    assert "──" in capsys.readouterr().out, "rows that fit are printed as a table"


def test_json_keeps_dates_and_non_ascii_characters() -> None:
    text = as_json({"at": datetime(2026, 1, 2, tzinfo=UTC), "é": {"a": None}})
    assert json.loads(text) == {"at": "2026-01-02T00:00:00Z", "é": {"a": None}}
    assert "é" in text


def test_tables_print_ids_verbatim(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "tinker://" + "x" * 300
    print_table(["ID", "Path"], [["a:train:0 [bold]:smile:", long]], "One")
    printed = capsys.readouterr().out
    assert "a:train:0 [bold]:smile:" in printed
    assert long in printed
