"""Bounds for numbers and times of JSON schemas, so that a model that repeats digits comes to an end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from tinkex.engine.sampler.json_keywords import LISTS, MAPPINGS, SCHEMAS, parts

__all__ = ["FRACTION", "MAX_INTEGER", "bound_values"]

MAX_INTEGER = (1 << 53) - 1
"""The largest integer that every JSON parser reads exactly: most read numbers as IEEE 754 doubles (RFC 8259, section 6)."""
FRACTION = 1e-10
"""Numbers with a bound have at most ten decimals; without one they may have an exponent, and are left alone."""
_MAX_DECIMALS = 9
"""Of the bounds of a schema in which decimals are limited, so that something lies between two of them."""

_TIME_LENGTHS = {"time": 24, "date-time": 35}
"""With nanoseconds and an offset: ``2026-01-31T12:00:00.123456789+00:00``."""

_COUNTING = frozenset(["contains", "if", "not", "oneOf"])
"""Keywords under which a narrower schema inside can make the whole one wider."""
_LOW, _HIGH = frozenset(["minimum", "exclusiveMinimum"]), frozenset(["maximum", "exclusiveMaximum"])


def bound_values(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema in which integers, and numbers with one bound, lie within ±(2⁵³ − 1) where they have no bound.

    Numbers with a bound also get at most ten decimals, and times nine of a second. What is valid under it is valid under the schema too. A schema that
    has larger or finer bounds, or keywords with which that would not be certain, is returned unchanged.

    >>> bound_values({"items": {"type": "integer", "minimum": 1}})
    {'items': {'type': 'integer', 'minimum': 1, 'maximum': 9007199254740991}}
    """
    for part in parts(schema):
        if _COUNTING & set(part) or any(_is_extreme(bound) for bound in _bounds(part)):
            return schema
    bounded: Mapping[str, Any] = _bounded(schema)
    return bounded


def _bounds(part: Mapping[str, Any]) -> Iterator[float]:
    """The bounds of a schema; ``exclusiveMinimum`` is a boolean in some drafts."""
    for name in _LOW | _HIGH:
        value = part.get(name)
        if isinstance(value, int | float):
            yield value


def _is_extreme(bound: float) -> bool:
    exponent = Decimal(repr(bound) if isinstance(bound, float) else int(bound)).as_tuple().exponent
    return not isinstance(exponent, int) or exponent < -_MAX_DECIMALS or abs(bound) >= MAX_INTEGER


def _bounded(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {name: _bounded_value(name, value) for name, value in schema.items()}
    given = set(schema)
    # Multiples are counted by an automaton of their own, whose product with a range may be too large.
    if {"const", "enum", "multipleOf"} & given:
        return result
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    has_bound = bool((_LOW | _HIGH) & given)
    if ("number" in kinds and has_bound) or ("integer" in kinds and "number" not in kinds):
        if not _LOW & given:
            result["minimum"] = -MAX_INTEGER
        if not _HIGH & given:
            result["maximum"] = MAX_INTEGER
        if "number" in kinds:
            result["multipleOf"] = FRACTION
    length = _TIME_LENGTHS.get(str(schema.get("format")))
    if length is not None and not {"maxLength", "minLength", "pattern"} & given:
        result["maxLength"] = length
    return result


def _bounded_value(name: str, value: Any) -> Any:
    if name in SCHEMAS or name in LISTS:
        return _bounded(value)
    if name in MAPPINGS and isinstance(value, Mapping):
        return {key: _bounded(inner) for key, inner in value.items()}
    return value
