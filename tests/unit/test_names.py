"""The names of the package: all there, loaded late."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tinkex


def test_importing_the_package_loads_no_library() -> None:
    program = "import sys, tinkex; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "pydantic", "numpy", "msgspec", "pyqwest", "google", "asyncio"}
    assert not heavy & set(out.stdout.split())


def test_a_name_is_the_same_object_each_time() -> None:
    assert tinkex.ServiceClient is tinkex.ServiceClient
    assert tinkex.TinkerError is tinkex.errors.TinkexError
    assert tinkex.types.Datum is tinkex.Datum


def test_every_name_is_listed_and_known_to_type_checkers() -> None:
    assert set(tinkex.__all__) <= set(dir(tinkex))
    source = ast.parse(Path(str(tinkex.__file__)).read_text())
    checked = next(node for node in source.body if isinstance(node, ast.If))
    seen = {
        alias.asname for node in ast.walk(checked) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == set(tinkex.__all__) - {"__title__", "__version__"}
    for name in tinkex.__all__:
        assert getattr(tinkex, name) is not None


def test_the_official_names_that_exist_here_are_exported() -> None:
    import tinker

    ours = set(dir(tinkex.types)) | set(dir(tinkex.errors))
    assert not {name for name in tinker.__all__ if name in ours} - set(tinkex.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="ServceClient"):
        _ = tinkex.ServceClient  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["losses", "observability"])
def test_the_modules_of_a_package_are_loaded_at_their_first_use(package: str) -> None:
    program = f"import tinkex; names = tinkex.{package}.__all__; print(all(getattr(tinkex.{package}, n) for n in names))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"
