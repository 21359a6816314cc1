"""Errors of decoding a body, rewritten so that they name the field and say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

from tinkex.errors import EngineError, InvalidInput, Unsupported

_PATH = re.compile(r" - at `\$?\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_VALUE = re.compile(r"Invalid (?:enum )?value (.*)$", re.DOTALL)


class InvalidField(InvalidInput):
    """A field of a request is invalid; ``field`` is its path, such as ``messages[0].role``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def rename_field(error: EngineError, names: Mapping[str, str]) -> EngineError:
    """An error of a native field as one of the client's field that it was made of; ``names`` maps native to client's.

    Errors that name none of these fields stay as they are.

    >>> rename_field(InvalidInput("prompt is too long"), {"prompt": "messages"}).args[0]
    'messages is too long'
    """
    if isinstance(error, InvalidField) or not isinstance(error, InvalidInput | Unsupported):
        return error
    message = str(error)
    for native, field in names.items():
        if message.startswith(native):
            first, *quoted = message.removeprefix(native).split(
                "\n"
            )  # lines of a grammar that the client did not write
            return InvalidField(field, field + first + ("; remove or change that part" if quoted else ""))
    return error


def explain_field_error(
    message: str, unsupported: Mapping[str, str], request: type[msgspec.Struct] | None = None
) -> InvalidField:
    """The error for a message of the JSON decoder; ``unsupported`` has advice for known fields.

    With the type of the request, the error of a value that is none of several names them.

    >>> explain_field_error("Expected `int | null`, got `str` - at `$.n`", {}).args[0]
    'n has the wrong type: expected `int | null`, got `str`.'
    >>> explain_field_error("Object contains unknown field `best_of`", {"best_of": "use n"}).args[0]
    'best_of is not supported; use n.'
    """
    found = _PATH.search(message)
    path = (found[1] if found else "").replace("[...]", "[]")
    reason = message[: found.start()] if found else message
    unknown, missing = _UNKNOWN.search(reason), _MISSING.search(reason)
    if missing:
        field = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidField(field, f"{field} is missing; it is required.")
    if unknown:
        name = unknown[1]
        field = f"{path}.{name}" if path else name
        advice = unsupported.get(field) or unsupported.get(name)
        if advice is not None:
            return InvalidField(field, f"{field} is not supported; {advice}.")
        return InvalidField(field, f"{field} is not a field that this route has; remove it.")
    if not path:
        return InvalidField("", f"the body is not valid: {reason}.")
    if path in unsupported:
        return InvalidField(path, f"{path} is not supported; {unsupported[path]}.")
    value = _VALUE.search(reason)
    allowed = ", ".join(_allowed_values(request, path)) if request is not None and value else ""
    if value and allowed:
        return InvalidField(path, f"{path} is {value[1]}, which is not supported; use one of: {allowed}.")
    reason = reason[:1].lower() + reason[1:]
    return InvalidField(path, f"{path} has the wrong type: {reason}.")


@lru_cache(maxsize=256)
def _allowed_values(request: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    """The values that a field may have, if it is one of several; ``path`` is as in an error."""
    found: Iterable[Any] = [inspect.type_info(request)]
    *names, last = re.findall(r"\w+", re.sub(r"\[[^]]*\]", "", path)) or [""]
    for name in names:
        found = [each for part in found for each in _fields(part, name)]
    found = list(found)
    tags = [
        each.tag for part in found for each in _alternatives(part) if getattr(each, "tag_field", None) == last
    ]
    fields = [each for part in found for field in _fields(part, last) for each in _alternatives(field)]
    values = [value for each in fields if isinstance(each, inspect.LiteralType) for value in each.values]
    return tuple(dict.fromkeys(str(value) for value in [*tags, *values]))


def _fields(part: Any, name: str) -> Iterator[Any]:
    """The types of a field in each alternative of a type that has it."""
    for each in _alternatives(part):
        if isinstance(each, inspect.StructType):
            yield from (field.type for field in each.fields if field.encode_name == name)


def _alternatives(part: Any) -> Iterator[Any]:
    """The types that a value, or an item of it, may have."""
    if isinstance(part, inspect.UnionType):
        for each in part.types:
            yield from _alternatives(each)
    elif isinstance(part, inspect.ListType):
        yield from _alternatives(part.item_type)
    else:
        yield part
