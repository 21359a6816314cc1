"""Request bodies for every endpoint: generated from the endpoint table's types, and mutations of valid ones."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
from hypothesis import strategies as st

from tinkex._wire.endpoints import ENDPOINTS, Endpoint
from tinkex.types import ForwardBackwardRequest

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "x" * 5000, "tinker://a/weights/b", "../../etc/passwd", "\x00", "tiny", "1e999"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def field_names(endpoint: Endpoint) -> list[str]:
    if endpoint.request is None:
        return []
    if endpoint.request is ForwardBackwardRequest:
        return ["model_id", "seq_id", "forward_backward_input", "forward_input"]
    return [field.name for field in msgspec.structs.fields(endpoint.request)]


def generated(endpoint: Endpoint) -> st.SearchStrategy[bytes]:
    """Objects with the fields of the request and arbitrary values."""
    names = field_names(endpoint)
    known = st.fixed_dictionaries({}, optional=dict.fromkeys(names, JSON_VALUES))
    unknown = st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=2)
    objects = st.tuples(known, unknown).map(lambda both: both[1] | both[0])
    return (objects | JSON_VALUES).map(as_json) | st.binary(max_size=200)


def as_json(value: object) -> bytes:
    # Python encodes NaN and lone surrogates, which are not valid JSON: two more kinds of invalid bodies.
    return json.dumps(value).encode("utf-8", "surrogatepass")


def mutated_object(value: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A valid body with one value replaced, removed or repeated."""
    places = _places(value)

    def put(choice: tuple[int, Any, str]) -> bytes:
        number, new, how = choice
        changed = json.loads(json.dumps(value))
        target, key = _walk(changed, places[number])
        if how == "drop":
            del target[key]
        elif how == "wrap":
            target[key] = [target[key]]
        elif how == "huge":
            target[key] = 2**63 if not isinstance(target[key], str) else target[key] * 3000
        elif how == "negative":
            target[key] = -1
        elif how == "infinite":
            target[key] = math.inf
        else:
            target[key] = new
        return as_json(changed)

    ways = st.sampled_from(["drop", "wrap", "huge", "negative", "infinite", "other"])
    return st.tuples(st.integers(0, len(places) - 1), JSON_VALUES, ways).map(put)


def mutated_bytes(body: bytes) -> st.SearchStrategy[bytes]:
    """A valid body with bytes changed, removed or repeated."""

    def edit(choice: tuple[str, int, int, bytes]) -> bytes:
        how, first, length, new = choice
        start = first % (len(body) + 1)
        end = min(start + length, len(body))
        if how == "cut":
            return body[:start] + body[end:]
        if how == "repeat":
            return body[:end] + body[start:]
        return body[:start] + new + body[start + len(new) :]

    edits = st.tuples(
        st.sampled_from(["cut", "repeat", "overwrite"]),
        st.integers(0, 10_000),
        st.integers(0, 64),
        st.binary(min_size=1, max_size=8),
    )
    return edits.map(edit)


def _places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:3]):
            found += _places(inner, (*path, number))
    return found


def _walk(value: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
    for key in path[:-1]:
        value = value[key]
    return value, path[-1]


TESTED_ENDPOINTS: list[Endpoint] = list(ENDPOINTS.values())
