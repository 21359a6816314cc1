"""Values ⇄ plain data (dict, list, str, numbers): what msgspec needs to know about our own classes."""

from __future__ import annotations

import base64
import math
from typing import Any, TypeVar

import msgspec
import numpy as np

from tinkex.types.inputs import ModelInput
from tinkex.types.tensors import TensorData

T = TypeVar("T")


def encode_hook(value: Any) -> Any:
    """Turns our non-struct classes into plain data."""
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
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


def decode_hook(kind: type, value: Any) -> Any:
    """Builds our non-struct classes from plain data."""
    if kind is ModelInput:
        if not isinstance(value, dict) or not isinstance(value.get("chunks"), list):
            raise ValueError('a model input is written {"chunks": [...]}')
        return ModelInput(chunks=value["chunks"])
    if kind is TensorData:
        if not isinstance(value, dict) or "data" not in value or "dtype" not in value:
            raise ValueError(
                'a tensor is written {"data": [...], "dtype": "int64" | "float32", "shape"?: [...]}'
            )
        return TensorData(
            data=value["data"],
            dtype=value["dtype"],
            shape=value.get("shape"),
            sparse_crow_indices=value.get("sparse_crow_indices"),
            sparse_col_indices=value.get("sparse_col_indices"),
        )
    raise NotImplementedError(f"no reader for {kind.__name__}")


def to_plain(value: Any, *, omit_none: bool = False, keep_bytes: bool = False) -> Any:
    """The value as dict, list, str and numbers; bytes become base64 unless ``keep_bytes``.

    >>> from tinkex.types import ModelInput
    >>> to_plain(ModelInput.from_ints([7]))
    {'chunks': [{'tokens': [7], 'type': 'encoded_text'}]}
    """
    builtin_types = (bytes,) if keep_bytes else None
    plain = msgspec.to_builtins(value, enc_hook=encode_hook, builtin_types=builtin_types)
    return _without_none(plain) if omit_none else plain


def from_plain(value: Any, kind: type[T]) -> T:
    """Builds a value of the given type, or raises ``ValueError`` naming the field that is wrong.

    >>> from tinkex.types import SamplingParams
    >>> from_plain({"max_tokens": 5}, SamplingParams).max_tokens
    5
    """
    try:
        return msgspec.convert(value, kind, dec_hook=decode_hook, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _without_none(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {k: _without_none(v) for k, v in plain.items() if v is not None}
    if isinstance(plain, list):
        if plain and isinstance(plain[0], int | float | str):
            return plain  # token and number lists hold no None and are long
        return [_without_none(v) for v in plain]
    return plain


def finite_or_text(value: float) -> float | str:
    """JSON has no NaN or Infinity: they travel as text, which readers of float fields accept.

    >>> finite_or_text(float("nan")), finite_or_text(1.5)
    ('NaN', 1.5)
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def base64_text(data: bytes) -> str:
    """Bytes as the text JSON carries."""
    return base64.b64encode(data).decode("ascii")
