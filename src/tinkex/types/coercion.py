"""Coerces field values to their annotated types: a dict to a value type, "5" or numpy's 5 to 5, a string to a time."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple, force_setattr

__all__ = ["as_bytes", "as_float", "as_int", "as_token_ids", "coerce", "packed_array"]


def coerce(value: msgspec.Struct) -> None:
    """Coerces every field of a value to its annotated type; raises ``ValueError`` that names the field.

    Values decoded from the wire have the right types already; for them this only checks the fields.

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
    if signature not in plan.valid_signatures:
        for name, allowed, item in zip(kind.__struct_fields__, plan.types, given, strict=True):
            if allowed is not None and type(item) not in allowed:
                force_setattr(value, name, _coerce_field(kind, name, allowed, item))
        given = astuple(value)
        plan.remember(given)
    for index, is_valid in plan.checks:
        if not is_valid(given[index]):
            name = kind.__struct_fields__[index]
            force_setattr(value, name, _convert(kind, name, given[index]))


def as_int(given: Any, where: str) -> int:
    """Converts an int, an integral float, a string, or a numpy or torch scalar to an int.

    >>> as_int("8", "max_tokens"), as_int(8.0, "max_tokens")
    (8, 8)
    """
    if type(given) is int:
        return given
    try:
        number = float(given) if isinstance(given, str) and "." in given else given
        integer = int(number)
        if not isinstance(number, str) and integer != number:
            raise ValueError("it has a fractional part")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where} must be an integer, got {given!r}") from error
    return integer


def as_float(given: Any, where: str) -> float:
    """Converts any number, a string, or a numpy or torch scalar to a float.

    >>> as_float("1e-3", "learning_rate")
    0.001
    """
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where} must be a number, got {given!r}") from error


def as_token_ids(tokens: Sequence[int] | npt.NDArray[Any]) -> list[int]:
    """Converts a flat sequence of token ids to a new list of ints.

    >>> as_token_ids((1, "2", 3.0))
    [1, 2, 3]
    """
    given: Any = tokens
    if type(tokens) is not list and not isinstance(tokens, np.ndarray):
        if isinstance(tokens, str | bytes | bytearray | Mapping | AbstractSet):
            raise ValueError(f"tokens must be a sequence of ints, got {type(tokens).__name__}")
        given = list(tokens)
    if type(given) is list:
        packed = None if given and type(given[0]) is bool else packed_array(given, "i", np.dtype("<i4"))
        if packed is not None and (not given or int(packed.min()) >= 0):
            # A copy, because programs reuse one list for several chunks.
            return given.copy() if type(given[0] if given else 0) is int else packed.tolist()
    array = np.asarray(given)
    if array.ndim != 1:
        raise ValueError(f"tokens must be a flat sequence of ints, got shape {array.shape}")
    if array.dtype.kind == "U":
        return as_token_ids([as_int(token, "a token id") for token in given])
    if array.dtype.kind == "f" and bool(np.all((array == np.floor(array)) & (np.abs(array) < 2**53))):
        array = array.astype(np.int64)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be ints, got values of type {array.dtype}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > np.iinfo(np.int32).max):
        raise ValueError(f"token ids must be in 0…2147483647, got {int(array.min())}…{int(array.max())}")
    found: list[int] = array.tolist()
    return found


def packed_array(values: Sequence[Any], code: str, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Converts a flat list of numbers to an array, twice as fast as numpy; returns None for anything else."""
    try:
        return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), dtype)
    except (struct.error, OverflowError, TypeError):
        return None


def as_bytes(given: object, where: str) -> bytes:
    """Converts bytes-like data, or a base64 string, to bytes.

    >>> as_bytes("aGk=", "ImageChunk.data")
    b'hi'
    """
    if type(given) is bytes:
        return given
    if isinstance(given, str):
        try:
            return base64.b64decode("".join(given.split()), validate=True)
        except ValueError as error:
            raise ValueError(f"{where} is not valid base64: {error}") from error
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    raise ValueError(f"{where} must be bytes or a base64 string, got {type(given).__name__}")


class _Plan:
    """The allowed types and further checks of the fields of one value type; computed once."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        annotations = [field.type for field in msgspec.structs.fields(kind)]
        self.types = [_allowed_types(annotation) for annotation in annotations]
        checks = [_value_check(annotation) for annotation in annotations]
        self.checks = [(index, is_valid) for index, is_valid in enumerate(checks) if is_valid is not None]
        self.valid_signatures: set[tuple[type, ...]] = set()
        """Tuples of field types known to be valid: one lookup covers nearly every value."""

    def remember(self, given: tuple[Any, ...]) -> None:
        if all(t is not None and type(item) in t for t, item in zip(self.types, given, strict=True)):
            self.valid_signatures.add(tuple(map(type, given)))


_PLANS: dict[type, _Plan] = {}


def _allowed_types(annotation: Any) -> frozenset[type] | None:
    """Returns the types a field may have, or None if any type is allowed or the class checks it."""
    if annotation is Any:
        return None
    origin = get_origin(annotation)
    if origin is Annotated:
        return _allowed_types(get_args(annotation)[0])
    if origin is Literal:
        return frozenset(type(choice) for choice in get_args(annotation))
    if origin in (list, dict):
        return frozenset({origin})
    if origin is Mapping:
        return frozenset({dict})
    if origin in _UNIONS:
        found: set[type] = set()
        for member in get_args(annotation):
            types = _allowed_types(member)
            if types is None:
                return None
            found |= types
        return frozenset(found)
    return frozenset({annotation}) if isinstance(annotation, type) else None


def _value_check(annotation: Any) -> Callable[[Any], bool] | None:
    """Returns the check of a field besides its type: one of the literals, or a list of value types only."""
    literals = _literals(annotation)
    if literals:
        return frozenset(literals).__contains__
    for one in _members(annotation):
        items = _allowed_types(get_args(one)[0]) if get_origin(one) is list else None
        if items is not None and not any(issubclass(item, _PLAIN) for item in items):
            return lambda given: type(given) is not list or all(type(item) in items for item in given)
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in _UNIONS else (annotation,)


def _literals(annotation: Any) -> list[Any]:
    """Returns the literals that a field is limited to; empty if it is not limited."""
    members = _members(annotation)
    literals = [literal for one in members if get_origin(one) is Literal for literal in get_args(one)]
    return [*literals, None] if literals and NoneType in members else literals


def _coerce_field(kind: type, name: str, allowed: frozenset[type], given: Any) -> Any:
    if isinstance(given, tuple(allowed - {int, float, list, str})):
        return given  # an instance of a subclass
    if not allowed & {bool, str, list}:
        if int in allowed:
            return as_int(given, f"{kind.__name__}.{name}")
        if float in allowed:
            return as_float(given, f"{kind.__name__}.{name}")
    return _convert(kind, name, given)


def _convert(kind: type, name: str, given: Any) -> Any:
    from tinkex.types import plain

    annotation = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
    try:
        return plain.from_plain(given, annotation)
    except ValueError as error:
        literals = " or ".join(map(repr, _literals(annotation)))
        reason = f"must be {literals}, got {given!r}" if literals else f"is invalid: {error}"
        raise ValueError(f"{kind.__name__}.{name} {reason}") from error


_UNIONS = (Union, UnionType)
_PLAIN = (int, float, str, bytes, dict, list)
