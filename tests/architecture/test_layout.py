"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "tinkex"
MODULES = sorted(p for p in SRC.rglob("*.py") if not p.name.endswith("_pb2.py"))
VAGUE = {"utils", "util", "helpers", "helper", "misc", "common", "compat"}


def test_the_top_level_is_a_map() -> None:
    entries = [path for path in SRC.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert len(entries) <= 26, "a new entry belongs into a package, or needs a reason in an ADR"


def test_every_directory_is_a_package() -> None:
    """One that Git left with nothing but compiled files would be found before the table of moved modules."""
    empty = [path.name for path in SRC.iterdir() if path.is_dir() and not (path / "__init__.py").exists()]
    assert set(empty) <= {"__pycache__"}, "their modules have moved: remove these directories"


def name_of(path: Path) -> str:
    return str(path.relative_to(SRC))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_short_and_named_after_its_subject(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500
    assert path.stem not in VAGUE


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is_and_nothing_is_left_unfinished(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no module docstring"
    for mark in ("TODO", "FIXME", "XXX"):
        assert mark not in text


def test_the_name_of_a_class_is_used_once() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = "import sys, tinkex; print(','.join(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = {name.split(".")[0] for name in out.strip().split(",")}
    assert not loaded & {
        "torch",
        "transformers",
        "pydantic",
        "httpx",
        "aiohttp",
        "pyqwest",
        "numpy",
        "msgspec",
        "logging",
        "asyncio",
        "google",
        "opentelemetry",
    }


def test_importing_the_package_loads_its_version_and_nothing_else() -> None:
    program = (
        "import sys; before = set(sys.modules); import tinkex; print(*sorted(set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) <= {"__future__", "tinkex", "tinkex._version"}


def test_importing_the_client_loads_no_engine() -> None:
    program = "import sys, tinkex; tinkex.ServiceClient; tinkex.types; print(','.join(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = set(out.strip().split(","))
    assert not {"torch", "transformers", "pydantic", "starlette", "uvicorn", "opentelemetry"} & loaded
    assert not [name for name in loaded if name.startswith("tinkex.engine")]
