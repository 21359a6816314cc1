"""The import contracts catch what they are for, and ARCHITECTURE.md shows the tables that are checked."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.import_rules import Import, check_packages, check_third_party, parse

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "tinkex"
ROWS = {"cli": ["clients"], "clients": ["wire", "seen.tracing"], "seen": ["errors"], "wire": [], "errors": []}


def contract(kind: str) -> dict[str, Any]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return next(each for each in settings["contracts"] if each["type"] == kind)


def modules_after(*names: str) -> set[str]:
    program = f"import sys; {'; '.join(f'import {name}' for name in names)}; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def imports(*pairs: str) -> list[Import]:
    needed = ("cli -> clients", "clients -> wire", "clients -> seen.tracing", "seen -> errors")
    return [Import(*pair.split(" -> ")) for pair in (*needed, *pairs)]


def test_what_the_table_allows_is_kept() -> None:
    assert not check_packages(ROWS, {}, imports("clients.rest -> wire.json", "wire -> wire.proto"))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("cli.main -> wire.json", "cli.main imports wire.json: cli may not import wire"),
        ("wire -> clients", "wire imports clients: wire may not import clients"),
        ("clients -> seen.events", "clients imports seen.events: clients may not import seen"),
        ("news -> errors", "news has no row"),
        ("cli -> news", "news has no row"),
    ],
)
def test_what_the_table_does_not_allow_is_an_error(broken: str, problem: str) -> None:
    assert check_packages(ROWS, {}, imports(broken)) == [problem]


def test_a_door_is_open_for_one_module_alone() -> None:
    doors = {"wire.local": ["clients.rest"]}
    assert not check_packages(ROWS, doors, imports("wire.local -> clients.rest"))
    assert check_packages(ROWS, doors, imports("wire.local -> clients.rest", "wire.far -> clients.rest"))
    assert check_packages(ROWS, doors, imports("wire.local -> clients.rest", "wire.local -> clients.admin"))


def test_a_part_of_a_package_with_its_own_row_is_allowed_by_its_own_name() -> None:
    rows = {"cli": ["seen"], "seen.sent": ["wire"], "wire": ["seen"], "seen": []}
    used = [Import("cli", "seen.events"), Import("seen.sent", "wire"), Import("wire", "seen.events")]
    assert not check_packages(rows, {}, used)
    assert check_packages(rows, {}, [*used, Import("cli", "seen.sent")]) == [
        "cli imports seen.sent: cli may not import seen.sent"
    ]


def test_an_entry_that_nothing_needs_is_an_error() -> None:
    problems = check_packages({**ROWS, "wire": ["errors"]}, {"cli.a": ["wire"]}, imports())
    assert problems == [
        "cli.a may import wire, and does not: delete the entry",
        "wire may import errors, and does not: delete the entry",
    ]


def test_a_table_with_a_cycle_or_an_unknown_name_is_an_error() -> None:
    used = [Import("a", "b"), Import("b", "a")]
    assert check_packages({"a": ["b"], "b": ["a"]}, {}, used) == ["b may import a, whose row is not below"]
    assert "a may import c, which has no row" in check_packages({"a": ["c"]}, {}, [])


def test_a_third_party_package_is_imported_by_its_own_list_alone() -> None:
    rows = {"torch": ["losses"]}
    assert not check_third_party(rows, [Import("losses.custom", "torch")])
    assert check_third_party(rows, [Import("losses", "torch"), Import("cli.a", "torch")]) == [
        "cli.a may not import torch"
    ]
    assert check_third_party(rows, [Import("losses", "torch"), Import("losses", "jax")]) == [
        "losses may not import jax"
    ]
    assert check_third_party(rows, []) == ["losses may import torch, and does not: delete the entry"]


def diagram() -> list[str]:
    """The lines that ARCHITECTURE.md draws of the contracts."""
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Who may import whom")[2]
    return section.split("```")[1].strip().splitlines()


def names_in(text: str) -> set[str]:
    return set(re.findall(r"[\w.]+", text))


def test_the_architecture_draws_the_layers_of_the_table() -> None:
    rows = parse(contract("allow_list")["rows"])
    level = {name: depth for depth, names in enumerate(diagram()[0].split("→")) for name in names_in(names)}
    official = {"__main__", "_exceptions", "_moved", "_version", "lib"}
    parts_for_the_engine = {name for name in rows if name.startswith("tokenizers.")}
    assert set(level) == set(rows) - official - parts_for_the_engine - {"engine"}
    for name, depth in level.items():
        for entry in set(rows[name]) & set(level):
            assert level[entry] > depth, f"{name} may import {entry}"


def test_the_architecture_says_what_the_engine_uses_and_who_uses_torch() -> None:
    rows, packages = parse(contract("allow_list")["rows"]), parse(contract("third_party")["rows"])
    assert names_in(diagram()[1]) == {"engine", *rows["engine"]} - {"_version"}
    assert names_in(diagram()[3]) == {"torch", *packages["torch"]}


def test_the_architecture_names_every_door_to_the_engine() -> None:
    text = (
        (ROOT / "ARCHITECTURE.md")
        .read_text()
        .partition("reaches the engine through")[2]
        .partition("\n\n`import")[0]
    )
    doors = parse(contract("allow_list")["doors"], separator="->")
    assert set(re.findall(r"`([\w/]+)\.py`", text)) == {door.replace(".", "/") for door in doors}


@pytest.mark.slow
def test_only_the_module_that_serves_needs_the_engine_to_be_imported() -> None:
    """Every other door is a function that imports the engine when it is called."""
    names = {
        ".".join(("tinkex", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")
        for path in SRC.rglob("*.py")
        if path.relative_to(SRC).parts[0] not in {"engine", "__main__.py"}
    }
    doors = parse(contract("allow_list")["doors"], separator="->")
    assert {f"tinkex.{door}" for door in doors} <= names
    loaded = modules_after(*sorted(names - {"tinkex.cli.server"}))
    assert not [name for name in loaded if name.startswith("tinkex.engine")]
    assert "torch" not in loaded


def test_what_the_engine_uses_of_the_tokenizers_loads_no_client() -> None:
    rows = parse(contract("allow_list")["rows"])
    names = [
        f"tinkex.{entry}" for entry in rows["engine"] if entry.startswith(("tokenizers.", "observability."))
    ]
    loaded = modules_after(*names)
    ours = {name for name in loaded if name.startswith("tinkex.")} - set(names)
    assert ours == {
        "tinkex._version",
        "tinkex.errors",
        "tinkex.errors.exchange",
        "tinkex.errors.transience",
        "tinkex.observability",
        "tinkex.tokenizers",
        "tinkex.tokenizers.loading",
        "tinkex.tokenizers.names",
    }
    assert not loaded & {
        "torch",
        "transformers",
        "tokenizers",
        "jinja2",
        "numpy",
        "msgspec",
        "pyqwest",
        "opentelemetry",
    }
