"""The JSON schema of a required tool call, for structured output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.engine.api.compatible.tool_formats import ToolFormat

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
_OPEN_KEYWORDS = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


def call_schema(
    tools: Sequence[tuple[str, Mapping[str, Any] | None]], tool_format: ToolFormat
) -> dict[str, Any]:
    """The schema of a call of one of the tools, each a name and the schema of its parameters."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, (name, parameters) in enumerate(tools):
        schema = _closed({"type": "object", **(parameters or NO_PARAMETERS)})
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    tool_format.arguments: _hoist(schema, f"tool{number}", definitions),
                },
                "required": ["name", tool_format.arguments],
                "additionalProperties": False,
            }
        )
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of parameters without room for undeclared ones, which a function would not accept.

    A schema that combines others may declare some of them there, so it stays as it is.

    >>> _closed({"type": "object", "properties": {"days": {"type": "integer"}}})["additionalProperties"]
    False
    """
    if "properties" not in schema or any(keyword in schema for keyword in _OPEN_KEYWORDS):
        return schema
    return {**schema, "additionalProperties": False}


def _hoist(schema: Mapping[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema without its definitions, which move to ``definitions``: references are relative to the whole document."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {
            key: _moved_reference(item, prefix) if key == "$ref" and isinstance(item, str) else moved(item)
            for key, item in value.items()
        }

    for name in _DEFINITIONS:
        found = schema.get(name)
        if isinstance(found, dict):
            definitions.update({f"{prefix}.{key}": moved(item) for key, item in found.items()})
    body: dict[str, Any] = moved({key: item for key, item in schema.items() if key not in _DEFINITIONS})
    if _refers_to_root(schema):
        definitions[prefix] = body
    return body


def _moved_reference(reference: str, prefix: str) -> str:
    """A reference within the parameters, as one within the schema of the call.

    >>> _moved_reference("#/$defs/Point", "tool0"), _moved_reference("#", "tool0")
    ('#/$defs/tool0.Point', '#/$defs/tool0')
    """
    if reference == "#":
        return f"#/$defs/{prefix}"
    for name in _DEFINITIONS:
        start = f"#/{name}/"
        if reference.startswith(start):
            return f"#/$defs/{prefix}.{reference.removeprefix(start)}"
    return reference


def _refers_to_root(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_refers_to_root, value))
    if isinstance(value, dict):
        return value.get("$ref") == "#" or any(map(_refers_to_root, value.values()))
    return False
