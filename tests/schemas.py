"""Random JSON schemas, of the keywords that structured output supports."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["schemas"]

NAMES = st.text("abcdé_", min_size=1, max_size=4)
CONSTANTS = st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"\\é\n ☃', max_size=5)

Schemas = st.SearchStrategy[dict[str, Any]]


def _with_bounds(kind: str, low: str, high: str, numbers: st.SearchStrategy[Any]) -> Schemas:
    """A type with an optional minimum and maximum, in this order."""
    return st.tuples(st.booleans(), st.booleans(), numbers, numbers).map(
        lambda drawn: {
            "type": kind,
            **({low: min(drawn[2:])} if drawn[0] else {}),
            **({high: max(drawn[2:])} if drawn[1] else {}),
        }
    )


def _leaves() -> Schemas:
    lengths = st.tuples(st.integers(0, 3), st.integers(3, 8))
    patterns = st.sampled_from(["^[a-c]{1,4}$", "^(yes|no)$", "^x[0-9]{0,3}y$", "^$"])
    formats = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4"])
    return st.one_of(
        _with_bounds("integer", "minimum", "maximum", st.integers(-1000, 1000)),
        _with_bounds("number", "minimum", "maximum", st.integers(-1000, 1000)),
        _with_bounds("integer", "exclusiveMinimum", "maximum", st.integers(-99, 99)).filter(
            lambda schema: schema.get("exclusiveMinimum", -100) < schema.get("maximum", 100)
        ),
        lengths.map(lambda drawn: {"type": "string", "minLength": drawn[0], "maxLength": drawn[1]}),
        patterns.map(lambda pattern: {"type": "string", "pattern": pattern}),
        formats.map(lambda name: {"type": "string", "format": name}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
        st.lists(CONSTANTS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
        CONSTANTS.map(lambda value: {"const": value}),
    )


def _arrays(items: Schemas) -> Schemas:
    sizes = st.tuples(st.integers(0, 2), st.integers(2, 3))
    plain = st.tuples(items, sizes).map(
        lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1][0], "maxItems": drawn[1][1]}
    )
    fixed = st.lists(items, min_size=1, max_size=3).map(
        lambda first: {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
    )
    return plain | fixed


def _objects(items: Schemas) -> Schemas:
    def schema(drawn: tuple[dict[str, Any], list[bool]]) -> dict[str, Any]:
        properties, needed = drawn
        required = [name for name, is_needed in zip(properties, needed, strict=False) if is_needed]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.tuples(
        st.dictionaries(NAMES, items, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4)
    ).map(schema)


def schemas() -> Schemas:
    """Schemas whose values are small: a model that knows no JSON ends within a few hundred tokens."""
    inner = st.recursive(
        _leaves(),
        lambda items: (
            _arrays(items)
            | _objects(items)
            | st.lists(items, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
        ),
        max_leaves=6,
    )
    referring = st.tuples(inner, inner).map(
        lambda drawn: {
            "type": "object",
            "$defs": {"first": drawn[0]},
            "properties": {"a": {"$ref": "#/$defs/first"}, "b": drawn[1]},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    described = inner.map(
        lambda schema: {**schema, "title": "A value", "description": "x", "examples": [1], "x-note": {}}
    )
    return inner | referring | described
