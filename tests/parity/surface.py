"""Reads two public surfaces by introspection and says, name by name, where they differ."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import os
import subprocess
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import pydantic
import tinker
import tinker.types

import tinkex
import tinkex.types
from tests.official_process import official_command

REQUIRED = "required"
NOT_MADE_BY_USERS = {"SamplingClient", "TrainingClient"}
"""Clients that other clients make: what their constructors take is internal in both packages."""
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "**",
}


@dataclass(frozen=True)
class Row:
    """One name of the official surface, and how ours compares; no differences means the same."""

    name: str
    kind: str
    differences: str
    form: str = ""
    """How the official method returns its result, and whether it is deprecated."""


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: str
    default: str

    def __str__(self) -> str:
        shown = self.name if self.default == REQUIRED else f"{self.name}={self.default}"
        return shown if self.kind in {"either", "keyword"} else f"{self.kind}{shown}".replace("=", "", 1)


def rows() -> list[Row]:
    """The official surface, compared."""
    return [
        *_names("tinker", tinker, tinkex, tinker.__all__),
        *_names("tinker.types", tinker.types, tinkex.types, _type_names()),
        *_names("tinker.auth", tinker.auth, tinkex.auth, tinker.auth.__all__),
    ]


def _type_names() -> list[str]:
    return sorted(
        name
        for name, value in vars(tinker.types).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    )


def _names(prefix: str, theirs: ModuleType, ours: ModuleType, names: list[str]) -> Iterator[Row]:
    for name in sorted(names):
        if prefix == "tinker" and name in {"types", "auth"}:
            yield Row(
                f"{prefix}.{name}", "module", "" if inspect.ismodule(getattr(ours, name, None)) else "missing"
            )
        elif prefix == "tinker" and hasattr(tinker.types, name):
            same = getattr(ours, name, None) is getattr(tinkex.types, name)
            yield Row(f"{prefix}.{name}", "type", "" if same else "not the same object as in types")
        elif name.startswith("Backcompat") and hasattr(ours, name):
            # Never made by users; ours has the attributes of its client in objects, not in the class.
            yield Row(f"{prefix}.{name}", "class", "")
        elif not hasattr(ours, name):
            yield Row(f"{prefix}.{name}", _kind(getattr(theirs, name)), "missing")
        else:
            yield from _compare(f"{prefix}.{name}", getattr(theirs, name), getattr(ours, name))


def _compare(name: str, theirs: Any, ours: Any) -> Iterator[Row]:
    kind = _kind(theirs)
    if kind == "function":
        yield Row(name, kind, _callable_differences(theirs, ours))
    elif kind == "literal":
        same = set(typing.get_args(theirs)) == set(typing.get_args(ours))
        yield Row(name, kind, "" if same else f"ours is {ours}")
    elif kind == "enum":
        same = {m.name: m.value for m in theirs} == {m.name: m.value for m in ours}
        yield Row(name, kind, "" if same else "other members")
    elif kind == "alias":
        yield Row(name, kind, "")
    else:
        yield Row(name, kind, _class_differences(theirs, ours))
        yield from _members(name, theirs, ours)


def _kind(value: Any) -> str:
    if typing.get_origin(value) is typing.Literal:
        return "literal"
    if inspect.isclass(value) and not typing.is_typeddict(value) and value is not str:
        if issubclass(value, enum.Enum):
            return "enum"
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isfunction(value) else "alias"


def _class_differences(theirs: type, ours: type) -> str:
    found = []
    if issubclass(theirs, BaseException):
        missing = [
            base.__name__
            for base in theirs.__mro__
            if base.__module__.startswith("tinker")
            and base.__name__ not in {b.__name__ for b in ours.__mro__}
        ]
        missing = [name for name in missing if getattr(tinkex, name, None) not in ours.__mro__]
        found += [f"not a {name}" for name in missing]
        if getattr(theirs, "status_code", None) != getattr(ours, "status_code", None):
            found.append("other status_code on the class")
    different = _parameter_differences(_constructor(theirs), _constructor(ours))
    found.append(
        "made with other arguments" if different and theirs.__name__ in NOT_MADE_BY_USERS else different
    )
    return "; ".join(part for part in found if part)


def _constructor(kind: type) -> list[Parameter]:
    if issubclass(kind, pydantic.BaseModel):
        return [
            Parameter(
                name,
                "keyword",
                REQUIRED if field.is_required() else _shown(field.get_default(call_default_factory=True)),
            )
            for name, field in kind.model_fields.items()
        ]
    if issubclass(kind, msgspec.Struct):
        fields = [
            Parameter(field.name, "keyword", _struct_default(field)) for field in msgspec.structs.fields(kind)
        ]
        tag = inspect.signature(kind).parameters.get(kind.__struct_config__.tag_field or "")
        return fields if tag is None else [Parameter(tag.name, "keyword", _shown(tag.default)), *fields]
    if issubclass(kind, BaseException) and kind.__init__ is Exception.__init__:
        return []
    return _parameters(kind.__init__)


def _struct_default(field: Any) -> str:
    if field.default is not msgspec.NODEFAULT:
        return _shown(field.default)
    return _shown(field.default_factory()) if field.default_factory is not msgspec.NODEFAULT else REQUIRED


def _parameters(function: Any) -> list[Parameter]:
    return [
        Parameter(
            p.name, KINDS[p.kind], REQUIRED if p.default is inspect.Parameter.empty else _shown(p.default)
        )
        for p in inspect.signature(function).parameters.values()
        if p.name not in {"self", "cls"}
    ]


def _shown(value: Any) -> str:
    if type(value).__name__ in {"_HAS_DEFAULT_FACTORY_CLASS", "UnsetType"} or type(value) is object:
        return "…"
    if isinstance(value, float) and value == int(value):
        return repr(int(value))
    if isinstance(value, pydantic.BaseModel | msgspec.Struct) or hasattr(value, "model_dump"):
        return repr(value.model_dump())
    return repr(value)


def _parameter_differences(theirs: list[Parameter], ours: list[Parameter]) -> str:
    found = []
    mine = {p.name: p for p in ours}
    their_names = {p.name for p in theirs}
    missing = [p for p in theirs if p.name not in mine]
    extra = [p for p in ours if p.name not in their_names]
    changed = [
        f"{p.name}: {_change(p, mine[p.name])}" for p in theirs if p.name in mine and _change(p, mine[p.name])
    ]
    order = [p.name for p in theirs if p.kind == "either" and p.name in mine]
    if missing:
        found.append(f"without {', '.join(str(p) for p in missing)}")
    if extra:
        found.append(f"also {', '.join(str(p) for p in extra)}")
    found += changed
    if order != [p.name for p in ours if p.kind == "either" and p.name in set(order)]:
        found.append("other order")
    return "; ".join(found)


def _change(theirs: Parameter, ours: Parameter) -> str:
    if theirs.kind != ours.kind:
        return f"{ours.kind} instead of {theirs.kind}"
    return "" if theirs.default == ours.default else f"{ours.default} instead of {theirs.default}"


def _members(name: str, theirs: type, ours: type) -> Iterator[Row]:
    for member, value in sorted(_public(theirs).items()):
        full = f"{name}.{member}"
        if not hasattr(ours, member) and member not in _fields(ours):
            yield Row(full, _member_kind(value), "missing")
            continue
        kind = _member_kind(value)
        mine = inspect.getattr_static(ours, member, None)
        if kind == "property":
            yield Row(full, kind, "" if not inspect.isfunction(mine) else "a method")
        elif _member_kind(mine) != kind:
            yield Row(full, kind, f"a {_member_kind(mine)}")
        else:
            yield Row(full, kind, _callable_differences(_function(value), _function(mine)), _form(value))


def _public(kind: type) -> dict[str, Any]:
    """What a class and its own bases define for their users; fields are in the constructor already."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.split(".")[0] != "tinker" or base.__name__ in {"BaseModel", "StrictBase"}:
            continue
        found |= {
            name: value
            for name, value in vars(base).items()
            if not name.startswith("_") and _member_kind(value) != "data"
        }
    return {
        name: value for name, value in found.items() if name not in _fields(kind) and name != "model_config"
    }


def _fields(kind: type) -> set[str]:
    if issubclass(kind, pydantic.BaseModel):
        return set(kind.model_fields)
    if issubclass(kind, msgspec.Struct):
        return set(kind.__struct_fields__)
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set()


def _member_kind(value: Any) -> str:
    if isinstance(value, property) or type(value).__name__ in {"cached_property", "member_descriptor"}:
        return "property"
    if isinstance(value, staticmethod):
        return "static method"
    if isinstance(value, classmethod):
        return "class method"
    if not inspect.isfunction(value):
        return "data"
    return "async method" if inspect.iscoroutinefunction(inspect.unwrap(value)) else "method"


def _function(value: Any) -> Any:
    return inspect.unwrap(value.__func__ if isinstance(value, staticmethod | classmethod) else value)


def _callable_differences(theirs: Any, ours: Any) -> str:
    found = [_parameter_differences(_parameters(theirs), _parameters(ours))]
    style, mine = _returned(theirs), _returned(ours)
    if not issubclass(mine, style):
        found.append(f"returns {mine.__doc__} instead of {style.__doc__}")
    return "; ".join(part for part in found if part)


def _form(method: Any) -> str:
    """The form of an official method's result."""
    function = _function(method)
    annotation = str(inspect.signature(function).return_annotation)
    found = []
    if "Backcompat" in annotation:
        found.append("a future of the client")
    elif (returned := _returned(function)) is not Value:
        found.append("an `APIFuture`" if returned is AwaitableFuture else str(returned.__doc__))
    if getattr(method, "__deprecated__", None) is not None:
        found.append("deprecated")
    return ", ".join(found)


class Value:
    """the value"""


class ConcurrentFuture:
    """a concurrent future"""


class AwaitableFuture:
    """an awaitable future"""


class OneFuture(ConcurrentFuture, AwaitableFuture):
    """a concurrent future that can be awaited"""


class PendingValue(Value, AwaitableFuture):
    """a value that can be awaited"""


def _returned(function: Any) -> type:
    """How a result is used: a subclass can be used wherever its bases can."""
    annotation = str(inspect.signature(function).return_annotation).strip("'\"").split("[")[0].split(".")[-1]
    if annotation in {"ConcurrentFuture", "Future"}:
        return ConcurrentFuture
    if annotation in {"APIFuture", "AwaitableConcurrentFuture"}:
        ours = function.__module__.startswith("tinkex.") and annotation == "AwaitableConcurrentFuture"
        return OneFuture if ours else AwaitableFuture
    return PendingValue if annotation.startswith("Pending") else Value


# ---- the packages, and 0.39 as far as it is documented ----

VERSIONS = ("0.36.0", "0.38.0")
"""The packages that are compared: the installed one, and the newest one that was available."""
NEW_IN_039 = {
    "RestClient.external_weights_upload_start": (
        "method",
        "a signed URL per file of external weights (experimental)",
    ),
    "RestClient.external_weights_upload_finish": (
        "method",
        "the path of the checkpoint of the uploaded weights (experimental)",
    ),
    "RestClient.search_checkpoints": (
        "method",
        "checkpoints by project, owner, type, base model and metadata (experimental)",
    ),
    "types.Checkpoint.base_model": ("field", "the name of the base model"),
    "types.CheckpointSearchRequest": ("class", "the filters of a search"),
    "types.CheckpointSearchResponse": ("class", "a page of a search"),
    "types.CheckpointSearchCursor": ("class", "where the next page starts"),
    "types.ExternalWeightsUploadStartRequest": (
        "class",
        "base model, LoRA configuration and project of an upload",
    ),
    "types.ExternalWeightsUploadStartResponse": ("class", "id, URLs and expiry of an upload"),
    "types.ExternalWeightsUploadStartResult": ("class", "the same, for the program"),
    "types.ExternalWeightsUploadFinishRequest": ("class", "the id of an upload"),
    "types.ExternalWeightsUploadFinishResponse": ("class", "the path of the checkpoint"),
    "types.ExternalWeightsUploadFinishResult": ("class", "the same, for the program"),
}
"""Names that the documentation of 0.39 has and 0.38.0 does not: kind and purpose."""


@functools.cache
def rows_of(version: str) -> tuple[Row, ...]:
    """The surface of a package, compared; one that is not the installed one in a process of its own."""
    if version == tinker.__version__:
        return tuple(rows())
    from tests.parity.conformance import ROOT, installed

    paths = os.pathsep.join([str(installed("tinker", version)), str(ROOT)])
    command = official_command("-m", "tests.parity.surface")
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    printed = json.loads(done.stdout)
    assert printed["version"] == version
    return tuple(Row(**row) for row in printed["rows"])


def available(name: str) -> bool:
    """Whether a name that 0.39 documents exists here."""
    found: Any = tinkex
    for part in name.split("."):
        if part in getattr(found, "__struct_fields__", ()):
            return True
        found = getattr(found, part, None)
    return found is not None


if __name__ == "__main__":  # with the package that is on the path
    print(json.dumps({"version": tinker.__version__, "rows": [dataclasses.asdict(row) for row in rows()]}))
