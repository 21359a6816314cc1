"""The keywords of JSON schemas, so that a misspelt one is rejected instead of constraining nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tinkex.errors import InvalidInput

__all__ = ["LISTS", "MAPPINGS", "SCHEMAS", "check_keywords", "parts"]

SCHEMAS = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
"""Keywords whose value is a schema, or a list of them."""

LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
"""Keywords whose value is a list of schemas."""

MAPPINGS = frozenset(
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
)
"""Keywords whose value maps names to schemas."""

_VALUES = frozenset(
    [
        "$anchor",
        "$comment",
        "$dynamicAnchor",
        "$dynamicRef",
        "$id",
        "$recursiveAnchor",
        "$recursiveRef",
        "$ref",
        "$schema",
        "$vocabulary",
        "const",
        "contentEncoding",
        "contentMediaType",
        "default",
        "dependentRequired",
        "deprecated",
        "description",
        "discriminator",
        "enum",
        "example",
        "examples",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "externalDocs",
        "format",
        "id",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "readOnly",
        "required",
        "title",
        "type",
        "uniqueItems",
        "writeOnly",
    ]
)

_KNOWN = SCHEMAS | LISTS | MAPPINGS | _VALUES


def check_keywords(schema: dict[str, Any]) -> None:
    """Raises ``InvalidInput`` for a keyword that no JSON schema has; those of extensions start with ``x-``.

    >>> check_keywords({"type": "object", "properties": {"name": {"maxLength": 8}}})
    >>> check_keywords({"items": {"maxLenght": 8}})
    Traceback (most recent call last):
      ...
    tinkex.errors.InvalidInput: structured_output.json_schema has the unknown keyword 'maxLenght'; correct or remove it
    """
    for part in parts(schema):
        for keyword in part:
            if keyword == "x-guidance" or not (keyword in _KNOWN or keyword.startswith("x-")):
                raise InvalidInput(
                    f"structured_output.json_schema has the unknown keyword {keyword!r}; correct or remove it"
                )


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema, itself included.

    >>> list(parts({"items": {"type": "string"}}))
    [{'items': {'type': 'string'}}, {'type': 'string'}]
    """
    if isinstance(schema, list):
        for item in schema:
            yield from parts(item)
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in schema.items():
        if keyword in SCHEMAS or keyword in LISTS:
            yield from parts(value)
        elif keyword in MAPPINGS and isinstance(value, dict):
            for inner in value.values():
                yield from parts(inner)
