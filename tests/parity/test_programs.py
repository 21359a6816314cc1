"""Whole programs for the official SDK do the same with ours; one word of their imports is changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.servers import ServedEngine

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("[!_]*.py"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    # the older names warn, and are used on purpose
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def run(program: Path, package: str, monkeypatch: pytest.MonkeyPatch, engine: ServedEngine) -> Any:
    source = program.read_text()
    if package != "tinker":
        source = re.sub(r"(?m)^import tinker$", f"import {package} as tinker", source)
        source = re.sub(r"(?m)^from tinker\b", f"from {package}", source)
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.key)
    names: dict[str, Any] = {"__name__": f"{package}_{program.stem}"}
    exec(compile(source, str(program), "exec"), names)
    assert names["tinker"].__name__ == package
    return names["main"]()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_finds_the_same_with_either_client(
    program: Path, served_engine: ServedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = run(program, "tinker", monkeypatch, served_engine)
    ours = run(program, "tinkex", monkeypatch, served_engine)
    assert_same(ours, theirs, program.stem)


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Equal in shape and kind, and in numbers as far as 32-bit arithmetic goes."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    elif isinstance(theirs, float):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=where)
    else:
        assert ours == theirs, where
