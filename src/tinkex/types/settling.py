"""Fields as programs give them (a dict for a value, "5" or numpy's 5 for 5, text for a time), as what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec.structs import astuple, force_setattr

__all__ = ["real_number", "settle", "whole_number"]


def settle(value: msgspec.Struct) -> None:
    """Makes every field of a value what its annotation says, or says which cannot be.

    Values read off the wire are right already: then this only looks at their fields.

    >>> from tinkex.types import SampleRequest
    >>> SampleRequest(prompt={"chunks": []}, sampling_params={"max_tokens": "8"}).sampling_params.max_tokens
    8
    """
    kind = type(value)
    plan = _PLANS.get(kind)
    if plan is None:
        plan = _PLANS[kind] = _Plan(kind)
    given = astuple(value)
    signature = tuple(map(type, given))
    if signature not in plan.settled:
        for name, settled, item in zip(kind.__struct_fields__, plan.types, given, strict=True):
            if settled is not None and type(item) not in settled:
                force_setattr(value, name, _read(kind, name, settled, item))
        given = astuple(value)
        plan.note(given)
    for place, holds in plan.closer:
        if not holds(given[place]):
            name = kind.__struct_fields__[place]
            force_setattr(value, name, _converted(kind, name, given[place]))


def whole_number(given: Any, where: str) -> int:
    """A whole number from an int, a float without fraction, text, or a scalar of numpy or torch.

    >>> whole_number("8", "max_tokens"), whole_number(8.0, "max_tokens")
    (8, 8)
    """
    if type(given) is int:
        return given
    try:
        number = float(given) if isinstance(given, str) and "." in given else given
        whole = int(number)
        if not isinstance(number, str) and whole != number:
            raise ValueError("it has a fraction")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where} must be a whole number, got {given!r}") from error
    return whole


def real_number(given: Any, where: str) -> float:
    """A float from any number, text, or a scalar of numpy or torch.

    >>> real_number("1e-3", "learning_rate")
    0.001
    """
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where} must be a number, got {given!r}") from error


class _Plan:
    """What the fields of one value type must be; computed once."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        annotations = [field.type for field in msgspec.structs.fields(kind)]
        self.types = [_settled_types(annotation) for annotation in annotations]
        looks = [_closer_look(annotation) for annotation in annotations]
        self.closer = [(place, holds) for place, holds in enumerate(looks) if holds is not None]
        self.settled: set[tuple[type, ...]] = set()
        """Types of all fields as they were once found right: looked up in one go, for nearly every value."""

    def note(self, given: tuple[Any, ...]) -> None:
        if all(t is not None and type(item) in t for t, item in zip(self.types, given, strict=True)):
            self.settled.add(tuple(map(type, given)))


_PLANS: dict[type, _Plan] = {}


def _settled_types(annotation: Any) -> frozenset[type] | None:
    """The types a field may hold, or None where anything goes or the class looks itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _settled_types(get_args(annotation)[0])
    if origin is Literal:
        return frozenset(type(choice) for choice in get_args(annotation))
    if origin in (list, dict):
        return frozenset({origin})
    if origin in _UNIONS:
        found: set[type] = set()
        for member in get_args(annotation):
            types = _settled_types(member)
            if types is None:
                return None
            found |= types
        return frozenset(found)
    return frozenset({annotation}) if isinstance(annotation, type) else None


def _closer_look(annotation: Any) -> Callable[[Any], bool] | None:
    """What must hold besides the type: one of the words, or a list of nothing but values."""
    words = _words(annotation)
    if words:
        return frozenset(words).__contains__
    for one in _members(annotation):
        items = _settled_types(get_args(one)[0]) if get_origin(one) is list else None
        if items is not None and not any(issubclass(item, _PLAIN) for item in items):
            return lambda given: type(given) is not list or all(type(item) in items for item in given)
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in _UNIONS else (annotation,)


def _words(annotation: Any) -> list[Any]:
    """The values a field is limited to; empty where it is not."""
    members = _members(annotation)
    words = [word for one in members if get_origin(one) is Literal for word in get_args(one)]
    return [*words, None] if words and NoneType in members else words


def _read(kind: type, name: str, settled: frozenset[type], given: Any) -> Any:
    if isinstance(given, tuple(settled - {int, float, list, str})):
        return given  # an instance of a subclass
    if not settled & {bool, str, list}:
        if int in settled:
            return whole_number(given, f"{kind.__name__}.{name}")
        if float in settled:
            return real_number(given, f"{kind.__name__}.{name}")
    return _converted(kind, name, given)


def _converted(kind: type, name: str, given: Any) -> Any:
    from tinkex.types import plain

    annotation = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
    try:
        return plain.from_plain(given, annotation)
    except ValueError as error:
        words = " or ".join(map(repr, _words(annotation)))
        why = f"must be {words}, got {given!r}" if words else f"cannot be read: {error}"
        raise ValueError(f"{kind.__name__}.{name} {why}") from error


_UNIONS = (Union, UnionType)
_PLAIN = (int, float, str, bytes, dict, list)
