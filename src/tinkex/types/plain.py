"""Converts values to and from plain data (dict, list, str, numbers), with msgspec hooks for our own classes."""

from __future__ import annotations

import base64
import math
from datetime import date, datetime
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import asdict

from tinkex.types.inputs import EncodedTextChunk, ModelInput
from tinkex.types.optimizers import OptimizerConfigBase, OptimizerFamily
from tinkex.types.tensors import TensorData

T = TypeVar("T")


def encode_hook(value: Any) -> Any:
    """Converts our non-struct classes to plain data."""
    if isinstance(value, ModelInput):
        return {"chunks": value.chunks}
    if isinstance(value, TensorData):
        plain: dict[str, Any] = {"data": value.data, "dtype": value.dtype}
        if value.shape is not None:
            plain["shape"] = value.shape
        if value.is_sparse:
            plain["sparse_crow_indices"] = value.sparse_crow_indices
            plain["sparse_col_indices"] = value.sparse_col_indices
        return plain
    if isinstance(value, OptimizerFamily):
        return value.model_dump()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"cannot encode a {type(value).__name__} as JSON")


def decode_hook(kind: type, value: Any) -> Any:
    """Builds our non-struct classes from plain data."""
    if kind is ModelInput:
        if not isinstance(value, dict) or not isinstance(value.get("chunks"), list):
            raise ValueError('a model input must be {"chunks": [...]}')
        if len(value) > 1:
            raise ValueError(f"a model input must have chunks only, got {', '.join(map(str, value))}")
        return ModelInput(chunks=value["chunks"])
    if kind is TensorData:
        if isinstance(value, np.ndarray):
            return TensorData.from_numpy(value)
        if not isinstance(value, dict) or "data" not in value or "dtype" not in value:
            raise ValueError(
                'a tensor must be {"data": [...], "dtype": "int64" | "float32", "shape"?: [...]}'
            )
        return TensorData(
            data=value["data"],
            dtype=value["dtype"],
            shape=value.get("shape"),
            sparse_crow_indices=value.get("sparse_crow_indices"),
            sparse_col_indices=value.get("sparse_col_indices"),
        )
    if kind is OptimizerConfigBase:
        return OptimizerConfigBase.model_validate(value)
    raise TypeError(f"cannot decode a {kind.__name__}")


def to_plain(
    value: Any, *, omit_none: bool = False, omit_defaults: bool = False, python: bool = False
) -> Any:
    """Converts the value to dict, list, str and numbers; bytes become strings, and times too unless ``python``.

    >>> from tinkex.types import ModelInput
    >>> to_plain(ModelInput.from_ints([7]))
    {'chunks': [{'tokens': [7], 'type': 'encoded_text'}]}
    """
    kept = (datetime, date) if python else None
    if omit_defaults:
        value = without_defaults(value, omit_none=omit_none)
    elif omit_none:
        value = without_none(value)
    return msgspec.to_builtins(value, enc_hook=encode_hook, builtin_types=kept)


def from_plain(value: Any, kind: type[T]) -> T:
    """Builds a value of the given type; raises ``ValueError`` that names the invalid field.

    >>> from tinkex.types import SamplingParams
    >>> from_plain({"max_tokens": 5}, SamplingParams).max_tokens
    5
    """
    try:
        return msgspec.convert(value, kind, dec_hook=decode_hook, strict=False)
    except msgspec.ValidationError as error:
        converted = _without_scalars(value)
        if converted is not value:
            return from_plain(converted, kind)
        raise ValueError(str(error)) from error


def _without_scalars(value: Any) -> Any:
    """Converts numpy and torch scalars to Python numbers; returns the same object if there are none."""
    if isinstance(value, dict):
        converted = {name: _without_scalars(item) for name, item in value.items()}
        return converted if any(converted[name] is not item for name, item in value.items()) else value
    if isinstance(value, list | tuple):
        items = [_without_scalars(item) for item in value]
        return items if any(one is not item for one, item in zip(items, value, strict=True)) else value
    return value.item() if getattr(value, "ndim", None) == 0 else value


_FLAT = frozenset({bool, int, float, str})


def without_none(value: Any) -> Any:
    """Converts structs to dictionaries without their ``None`` fields.

    Everything else is returned as it is: a prompt of 100k tokens is not copied, and a ``None`` inside a caller's
    dictionary is kept.

    >>> from tinkex.types import LoraConfig
    >>> without_none(LoraConfig(rank=4, train_mlp=False, train_attn=False))
    {'rank': 4, 'train_unembed': True, 'train_mlp': False, 'train_attn': False}
    """
    if type(value) is EncodedTextChunk:
        return value  # has no None; nearly every prompt is one of these
    if isinstance(value, msgspec.Struct):
        fields: dict[str, Any] = {
            name: item if type(item) in _FLAT else without_none(item)
            for name, item in asdict(value).items()
            if item is not None
        }
        config = value.__struct_config__
        return fields if config.tag_field is None else {config.tag_field: config.tag, **fields}
    if isinstance(value, ModelInput):
        return {"chunks": [without_none(chunk) for chunk in value.chunks]}
    if isinstance(value, list):
        return [without_none(item) for item in value] if value and type(value[0]) not in _FLAT else value
    if isinstance(value, dict):
        return {name: without_none(item) for name, item in value.items()}
    return value


def without_defaults(value: Any, *, omit_none: bool = False) -> Any:
    """Converts structs to dictionaries without the fields that have their default value.

    >>> from tinkex.types import SamplingParams
    >>> without_defaults(SamplingParams(max_tokens=8, top_p=1.0))
    {'max_tokens': 8}
    """
    if isinstance(value, msgspec.Struct):
        return {
            info.name: without_defaults(item, omit_none=omit_none)
            for info in msgspec.structs.fields(type(value))
            if (item := getattr(value, info.name)) != _default(info) and not (omit_none and item is None)
        }
    if isinstance(value, ModelInput):
        return {"chunks": without_defaults(value.chunks, omit_none=omit_none)}
    if isinstance(value, list):
        return [without_defaults(item, omit_none=omit_none) for item in value]
    return value


def _default(info: msgspec.structs.FieldInfo) -> Any:
    return info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()


def finite_or_text(value: float) -> float | str:
    """Returns NaN and infinities, which JSON does not have, as strings that decoders of float fields accept.

    >>> finite_or_text(float("nan")), finite_or_text(1.5)
    ('NaN', 1.5)
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def base64_text(data: bytes) -> str:
    """Encodes bytes for JSON."""
    return base64.b64encode(data).decode("ascii")
