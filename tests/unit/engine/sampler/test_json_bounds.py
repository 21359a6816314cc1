"""Numbers without bounds get some, and nothing else of a schema changes."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schemas import schemas
from tinkex.engine.sampler.json_bounds import FRACTION, MAX_INTEGER, bound_values

BOUNDED = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, BOUNDED),
        ({"type": ["integer", "null"]}, {**BOUNDED, "type": ["integer", "null"]}),
        (
            {"type": "integer", "exclusiveMinimum": 3},
            {"type": "integer", "exclusiveMinimum": 3, "maximum": MAX_INTEGER},
        ),
        (
            {"type": "number", "minimum": 0.5},
            {"type": "number", "minimum": 0.5, "maximum": MAX_INTEGER, "multipleOf": FRACTION},
        ),
        (
            {"type": "string", "format": "date-time"},
            {"type": "string", "format": "date-time", "maxLength": 35},
        ),
        ({"properties": {"a": {"type": "integer"}}}, {"properties": {"a": BOUNDED}}),
        ({"$defs": {"a": {"items": {"type": "integer"}}}}, {"$defs": {"a": {"items": BOUNDED}}}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"anyOf": [BOUNDED, {"type": "null"}]}),
    ],
)
def test_numbers_are_bounded_wherever_they_are(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert bound_values(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": ["integer", "number"]},
        {"type": "string", "format": "time", "maxLength": 99},
        {"type": "string", "format": "uuid"},
        {"type": {}, "format": [], "minimum": "0"},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1e-12},
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        {"type": "integer", "enum": [1 << 60]},
        {"type": "integer", "const": 1 << 60},
        {"type": "integer", "multipleOf": 7},
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        {"type": "integer", "allOf": [{"minimum": 1 << 60}]},
        {"enum": [{"type": "integer"}]},
        {"properties": {"a": True}, "default": {"type": "integer"}},
    ],
)
def test_what_could_change_its_meaning_stays(schema: dict[str, Any]) -> None:
    assert bound_values(schema) == schema


@given(schemas(), st.integers(-(1 << 60), 1 << 60))
def test_what_the_bounded_schema_accepts_the_schema_accepts(schema: dict[str, Any], value: int) -> None:
    validator = jsonschema.Draft202012Validator
    for each in (value, [value], {"a": value}):
        assert validator(schema).is_valid(each) or not validator(bound_values(schema)).is_valid(each)
