from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.cli import output as official

from tinkex.cli.render import as_json, moment, or_missing, print_table, size, yes_no


@given(st.integers(-5, 1 << 62))
def test_sizes_read_as_in_the_official_program(num_bytes: int) -> None:
    if num_bytes < 1 << 60:
        assert size(num_bytes) == official.format_size(num_bytes)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "seconds", [5, 45, 90, 150, 3000, 3700, 7300, 80_000, 90_000, 200_000, 600_000, 700_000, 1_500_000, 2_600_000, 9_000_000]
)  # fmt: skip
def test_times_read_as_in_the_official_program(seconds: int, sign: int) -> None:
    # Half a second off the boundary, as the official function reads the clock itself.
    when = datetime.now(UTC) - timedelta(seconds=sign * (seconds + 0.5))
    assert moment(when) == official.format_timestamp(when)


def test_what_is_missing_is_said() -> None:
    assert moment(None) == size(None) == or_missing(None) == or_missing("") == yes_no(None) == "N/A"
    assert moment(None, missing="Never") == "Never"
    assert [yes_no(value) for value in (True, False)] == ["Yes", "No"]
    assert moment(datetime.fromisoformat("2020-01-02")) == "2020-01-02"


def test_on_narrow_terminals_rows_are_blocks_whose_paths_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "tinker://0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f:train:0/weights/final"
    monkeypatch.setenv("COLUMNS", "50")
    print_table(["ID", "Type", "Path"], [["weights/final", "training", path], ["x", "sampler", path]], "Two")
    shown = capsys.readouterr().out
    assert shown.splitlines()[:5] == ["Two", "", "ID    weights/final", "Type  training", f"Path  {path}"]
    print_table(["Property", "Value"], [["Tinker Path", path], ["Size", "1 B"]])
    assert capsys.readouterr().out == f"Tinker Path  {path}\nSize         1 B\n"
    print_table(["ID", "Type"], [["a", "training"]])
    assert "──" in capsys.readouterr().out, "what fits is a table"


def test_json_keeps_dates_and_letters() -> None:
    text = as_json({"at": datetime(2026, 1, 2, tzinfo=UTC), "é": {"a": None}})
    assert json.loads(text) == {"at": "2026-01-02T00:00:00Z", "é": {"a": None}}
    assert "é" in text


def test_tables_show_ids_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "tinker://" + "x" * 300
    print_table(["ID", "Path"], [["a:train:0 [bold]:smile:", long]], "One")
    said = capsys.readouterr().out
    assert "a:train:0 [bold]:smile:" in said
    assert long in said
