"""Every public method of six versions of the official client works, or is rejected with a documented reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parity.conformance import DOCUMENT, REJECTED, VERSIONS, endpoints_section, probe, probe_commands
from tests.servers import ServedEngine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("version", VERSIONS)
def test_every_method_works(version: str, served_engine: ServedEngine, tiny_model: Path) -> None:
    results = probe(version, served_engine, tiny_model)
    failed = {m: r for m, r in results.items() if r != "works" and not (m in REJECTED and r != "not driven")}
    assert failed == {}
    assert len(results) >= 70
    listed = set(re.findall(r"^\| `([\w.]+)` \|", DOCUMENT.read_text("utf-8"), re.MULTILINE))
    assert set(results) <= listed, "write the table again: python -m tests.parity.conformance"


def test_the_report_lists_the_extensions_of_the_endpoint_table() -> None:
    assert DOCUMENT.read_text("utf-8").endswith("\n".join(["", *endpoints_section(), ""]))


def test_every_command_works(served_engine: ServedEngine) -> None:
    results = probe_commands(served_engine)
    assert {name: result for name, result in results.items() if result != "works"} == {}
    assert len(results) >= 19
