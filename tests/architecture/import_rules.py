"""Import contracts that are allow-lists: what is not written down is an error, and so is what is written and not needed.

``lint-imports`` runs them with the tables of ``pyproject.toml``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

ROOT = "tinkex"


@dataclass(frozen=True)
class Import:
    """Modules of the package are named without its name: ``cli.server``; third-party ones by theirs."""

    importer: str
    imported: str


def parse(rows: Iterable[str], separator: str = ":") -> dict[str, list[str]]:
    """The table of lines such as ``cli: train, clients``.

    >>> parse(["cli: train, clients", "errors:"])
    {'cli': ['train', 'clients'], 'errors': []}
    """
    table: dict[str, list[str]] = {}
    for row in rows:
        name, _, listed = row.partition(separator)
        if name.strip() in table:
            raise ValueError(f"{name.strip()} has two rows")
        table[name.strip()] = [entry.strip() for entry in listed.split(",") if entry.strip()]
    return table


def is_within(module: str, package: str) -> bool:
    """Whether a module is a package or lies in it."""
    return module == package or module.startswith(f"{package}.")


def unit_of(module: str, units: Iterable[str]) -> str | None:
    """The most specific row that a module falls under."""
    return max((unit for unit in units if is_within(module, unit)), key=len, default=None)


def check_packages(
    rows: Mapping[str, Sequence[str]], doors: Mapping[str, Sequence[str]], imports: Iterable[Import]
) -> list[str]:
    """What is wrong with the imports between our own modules, or with the table itself.

    ``rows`` are ordered: a package may be allowed to import only what has a row further down, so there are no cycles.
    ``doors`` are single modules that may import single modules besides. An ``__init__`` may import what it contains.
    """
    problems: list[str] = []
    order = list(rows)
    for unit, allowed in rows.items():
        for entry in allowed:
            target = unit_of(entry, order)
            if target is None:
                problems.append(f"{unit} may import {entry}, which has no row")
            elif order.index(target) <= order.index(unit):
                problems.append(f"{unit} may import {entry}, whose row is not below")
    used: set[tuple[str, str]] = set()
    for each in imports:
        if is_within(each.imported, each.importer):
            continue
        if each.imported in doors.get(each.importer, ()):
            used.add((each.importer, each.imported))
            continue
        unit, target = unit_of(each.importer, order), unit_of(each.imported, order)
        if unit is None or target is None:
            problems.append(f"{each.importer if unit is None else each.imported} has no row")
        elif unit != target:
            # A package stands for its own row; where a part of it has a row too, that part is named by itself.
            entry = next(
                (e for e in rows[unit] if (e == target if e in rows else is_within(each.imported, e))), None
            )
            if entry is None:
                problems.append(f"{each.importer} imports {each.imported}: {unit} may not import {target}")
            else:
                used.add((unit, entry))
    for table in (rows, doors):
        problems += [
            f"{name} may import {entry}, and does not: delete the entry"
            for name, entries in table.items()
            for entry in entries
            if (name, entry) not in used
        ]
    return sorted(set(problems))


def check_third_party(rows: Mapping[str, Sequence[str]], imports: Iterable[Import]) -> list[str]:
    """What is wrong with the imports of other people's packages: each has a row with the modules that may import it."""
    problems: list[str] = []
    used: set[tuple[str, str]] = set()
    for each in imports:
        importers = [entry for entry in rows.get(each.imported, ()) if is_within(each.importer, entry)]
        used.update((each.imported, entry) for entry in importers)
        if not importers:
            problems.append(f"{each.importer} may not import {each.imported}")
    problems += [
        f"{entry} may import {package}, and does not: delete the entry"
        for package, entries in rows.items()
        for entry in entries
        if (package, entry) not in used
    ]
    return sorted(set(problems))


def own_imports(graph: ImportGraph) -> list[Import]:
    """The imports from one of our modules to another; those of the root package are the public names."""
    return [
        Import(importer.removeprefix(f"{ROOT}."), imported.removeprefix(f"{ROOT}."))
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if importer.startswith(f"{ROOT}.") and imported.startswith(f"{ROOT}.")
    ]


def third_party_imports(graph: ImportGraph) -> list[Import]:
    """The imports of packages that are neither ours nor the standard library's."""
    return [
        Import(importer.removeprefix(f"{ROOT}."), imported)
        for imported in graph.modules
        if not is_within(imported, ROOT) and imported.partition(".")[0] not in sys.stdlib_module_names
        for importer in graph.find_modules_that_directly_import(imported)
    ]


class _Rows(Contract):
    rows = fields.ListField(subfield=fields.StringField())

    def render_broken_contract(self, check: ContractCheck) -> None:
        for problem in check.metadata["problems"]:
            output.print_error(problem)


class AllowList(_Rows):
    """What each package may import of ours."""

    type_name = "allow_list"
    doors = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        doors = parse(self.doors or [], separator="->")
        problems = check_packages(parse(self.rows), doors, own_imports(graph))
        return ContractCheck(kept=not problems, metadata={"problems": problems})


class ThirdParty(_Rows):
    """Who may import each package that is not ours."""

    type_name = "third_party"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        problems = check_third_party(parse(self.rows), third_party_imports(graph))
        return ContractCheck(kept=not problems, metadata={"problems": problems})
