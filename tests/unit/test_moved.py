"""Old module paths lead to the modules at their new places, with a warning that names them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

import tinkex
from tinkex._moved import MOVED, RENAMED
from tinkex.observability.events import RequestFinished


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    forget_old_paths()
    yield
    forget_old_paths()


def forget_old_paths() -> None:
    for old in MOVED:
        sys.modules.pop(old, None)
        name = old.removeprefix("tinkex.")
        if "." not in name:
            vars(tinkex).pop(name, None)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_module_at_the_new_one(old: str) -> None:
    with pytest.warns(DeprecationWarning, match="is now tinkex"):
        found = import_module(old)
    assert found is import_module(MOVED[old])
    assert found.__name__ == MOVED[old]
    assert found.__spec__ is not None
    assert found.__spec__.name == MOVED[old]


@pytest.mark.parametrize("old", [old for old in MOVED if old.count(".") == 1])
def test_an_old_path_is_an_attribute_of_the_package(old: str) -> None:
    name = old.removeprefix("tinkex.")
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}; the old path is removed in"):
        found = getattr(tinkex, name)
    assert found is import_module(MOVED[old])
    assert getattr(tinkex, name) is found  # without a second warning, which would be an error here


def test_the_warning_points_at_the_line_that_imports() -> None:
    with pytest.warns(DeprecationWarning, match=r"tinkex\.events") as warned:
        from tinkex.events import RequestFinished as Finished  # type: ignore[import-not-found]
    with pytest.warns(DeprecationWarning, match=r"tinkex\.metrics") as of_attribute:
        assert tinkex.metrics is import_module("tinkex.observability.metrics")
    with pytest.warns(DeprecationWarning, match=r"tinkex\.tracing") as of_name:
        from tinkex import tracing
    assert Finished is RequestFinished
    assert tracing is import_module("tinkex.observability.tracing")
    assert {entry.filename for warnings in (warned, of_attribute, of_name) for entry in warnings} == {
        __file__
    }


def test_a_module_inside_a_moved_package_is_loaded_once() -> None:
    with pytest.warns(DeprecationWarning, match=r"tinkex\.telemetry is now"):
        import tinkex.telemetry.reporter  # type: ignore[import-not-found]
    assert tinkex.telemetry.reporter.Reporter is import_module("tinkex.observability.telemetry").Reporter


def test_a_pickle_that_names_an_old_path_loads() -> None:
    event = RequestFinished("healthz", 0, 200, 0.5)
    stored = pickle.dumps(event, protocol=0).replace(b"tinkex.observability.events", b"tinkex.events")
    assert b"tinkex.observability" not in stored
    with pytest.warns(DeprecationWarning, match=r"tinkex\.events"):
        assert pickle.loads(stored) == event


def test_a_path_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tinkex\.nothing'"):
        import_module("tinkex.nothing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tinkex.nothing


@pytest.mark.slow
def test_nothing_of_ours_uses_an_old_path() -> None:
    program = "import sys, tinkex, tinkex._moved as m; [getattr(tinkex, n) for n in tinkex.__all__]; sys.exit(any(o in sys.modules for o in m.MOVED))"
    assert (
        subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning", "-c", program], check=False
        ).returncode
        == 0
    )


@pytest.mark.parametrize(("module", "old"), [(module, old) for module in RENAMED for old in RENAMED[module]])
def test_an_old_name_is_the_object_under_the_new_one(module: str, old: str) -> None:
    loaded, new = import_module(module), RENAMED[module][old]
    with pytest.warns(
        DeprecationWarning, match=f"{module}.{old} is now {new}; the old name is removed in"
    ) as warned:
        found = getattr(loaded, old)
    assert found is getattr(loaded, new)
    assert warned[0].filename == __file__


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    for module in RENAMED:
        with pytest.raises(AttributeError, match="has no attribute 'never'"):
            _ = import_module(module).never
