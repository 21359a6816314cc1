"""`import tinkex as tinker`: every official name, signature and import path, or a listed reason."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tinker
import tinker.types

import tinkex
from tests.parity.differences import reasons
from tests.parity.surface import NEW_IN_039, VERSIONS, available, rows, rows_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "version", [pytest.param(each, marks=[pytest.mark.slow] * (each != VERSIONS[0])) for each in VERSIONS]
)
def test_every_difference_is_listed_with_a_reason(version: str) -> None:
    listed = {name: what for name, (what, _) in reasons(version).items()}
    found = {row.name: row.differences for row in rows_of(version) if row.differences}
    assert found == listed


def test_every_name_that_is_documented_for_039_exists() -> None:
    assert [name for name in NEW_IN_039 if not available(name)] == []


def test_nothing_is_compared_twice_and_everything_is_compared() -> None:
    names = [row.name for row in rows()]
    assert len(names) == len(set(names))
    assert {f"tinker.{name}" for name in tinker.__all__} <= set(names)
    assert len(names) > 300


@pytest.mark.slow
def test_the_table_in_the_docs_is_current() -> None:
    written = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate-docs"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert written.returncode == 0, written.stdout + written.stderr


IMPORTED_PATHS = ["types.tensor_data", "types.topk_logprobs", "_exceptions"]
"""Modules that hold more than names of tinkex.types."""


def official_type_modules() -> list[str]:
    return ["shared.untyped_api_future"] + [
        module.name
        for module in pkgutil.walk_packages(tinker.types.__path__)
        if not module.name.startswith("_") and module.name != "untyped_api_future"
    ]


def defined_in(module: ModuleType) -> list[str]:
    """The public names a module's own source defines."""
    names = list(getattr(module, "__all__", []))
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


@pytest.mark.parametrize("path", IMPORTED_PATHS)
def test_a_module_that_programs_import_has_the_same_path_here(path: str) -> None:
    theirs = importlib.import_module(f"tinker.{path}")
    ours = importlib.import_module(f"tinkex.{path}")
    for name in defined_in(theirs):
        assert getattr(ours, name, None) is not None, name


@pytest.mark.parametrize("module", official_type_modules())
def test_what_a_module_of_the_official_types_defines_is_found_under_its_path_here(module: str) -> None:
    exported = {
        name
        for name in defined_in(importlib.import_module(f"tinker.types.{module}"))
        if hasattr(tinker.types, name)
    }
    ours = importlib.import_module(f"tinkex.types.{module}")
    assert not [name for name in exported if getattr(ours, name, None) is not getattr(tinkex.types, name)]
    last = module.rpartition(".")[2]
    assert module != last or getattr(tinkex.types, last) is ours


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("lib.public_interfaces", "APIFuture"),
        ("lib.public_interfaces", "AwaitableConcurrentFuture"),
        ("lib.public_interfaces", "ServiceClient"),
        ("lib.public_interfaces.admin_client", "AdminClient"),
        ("lib.public_interfaces.api_future", "APIFuture"),
        ("lib.public_interfaces.backcompat_sampling_client_future", "BackcompatSamplingClientFuture"),
        ("lib.public_interfaces.backcompat_training_client_future", "BackcompatTrainingClientFuture"),
        ("lib.public_interfaces.custom_loss", "LossHandle"),
        ("lib.public_interfaces.rest_client", "RestClient"),
        ("lib.public_interfaces.sampling_client", "SamplingClient"),
        ("lib.public_interfaces.service_client", "ServiceClient"),
        ("lib.public_interfaces.training_client", "TrainingClient"),
        ("lib.retry_handler", "RetryConfig"),
        ("types.tensor_data", "TensorData"),
        ("_exceptions", "RequestFailedError"),
    ],
)
def test_import_paths_programs_use_lead_to_the_same_objects(path: str, name: str) -> None:
    found = getattr(importlib.import_module(f"tinkex.{path}"), name)
    assert found is getattr(tinkex, name)


def test_methods_can_be_replaced_on_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (tinkex.ServiceClient, tinkex.TrainingClient, tinkex.SamplingClient, tinkex.RestClient):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_"):
                continue
            with monkeypatch.context() as patch:
                patch.setattr(kind, name, lambda *_, **__: "patched")
                assert getattr(kind, name)() == "patched"
            assert getattr(kind, name) is method
