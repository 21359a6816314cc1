"""The C structures of ``csrc/core.h``, field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from enum import IntEnum

__all__ = [
    "MAX_PARTS",
    "PROJECTIONS",
    "DrawC",
    "ExtentC",
    "HeadC",
    "LayerC",
    "LoraC",
    "LoraPassC",
    "MatrixC",
    "ModelC",
    "PassC",
    "SegmentC",
    "SequenceC",
    "StorageFormat",
    "TenantC",
]


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


PROJECTIONS = 7
"""Projections of a layer: query, key, value, output, gate, up, down."""

MAX_PARTS = 3
"""Projections that can share an input."""


class StorageFormat(IntEnum):
    """How a matrix is stored; ``csrc/packed.h`` defines the packed formats."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    Q8 = 3
    Q4 = 4
    TRANSPOSED = 5


class MatrixC(Structure):
    """A weight matrix and its storage format."""

    _fields_ = (("data", c_void_p), ("format", c_int64))


class LayerC(Structure):
    """One layer's weights; a bias or norm that the model family does not have is NULL."""

    _fields_ = (
        ("weights", MatrixC * PROJECTIONS),
        ("biases", c_void_p * PROJECTIONS),
        *_fields(c_void_p, "input_norm", "mlp_norm", "q_norm", "k_norm"),
        ("window", c_int64),
    )


class ModelC(Structure):
    """A model's shape and pointers to its weights."""

    _fields_ = (
        *_fields(c_int64, "num_layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocab"),
        ("norm_eps", c_double),
        *_fields(c_void_p, "embedding", "final_norm"),
        ("unembedding", MatrixC),
        ("layers", POINTER(LayerC)),
    )


class LoraC(Structure):
    """A and B of one projection, ``transposed`` or as torch stores them; NULL where an adapter has none."""

    _fields_ = (*_fields(c_void_p, "a", "b"), ("transposed", c_int64))


class SegmentC(Structure):
    """Consecutive rows that share an adapter."""

    _fields_ = (
        *_fields(c_int64, "first_row", "num_rows", "rank"),
        ("scale", c_double),
        ("loras", POINTER(LoraC)),
    )


class ExtentC(Structure):
    """Keys and values of consecutive positions, from ``start`` on; strides count floats."""

    _fields_ = (
        ("keys", c_void_p),
        *_fields(c_int64, "start", "layer_stride", "value_offset", "head_stride"),
    )


class SequenceC(Structure):
    """Consecutive rows that continue one sequence, and the extents of its keys and values."""

    _fields_ = (
        *_fields(c_int64, "first_row", "num_rows", "position"),
        ("extents", POINTER(ExtentC)),
        ("num_extents", c_int64),
    )


class PassC(Structure):
    """The rows of one pass."""

    _fields_ = (
        *_fields(c_int64, "num_rows", "num_sequences", "num_segments"),
        *_fields(c_void_p, "tokens", "cosines", "sines"),
        ("sequences", POINTER(SequenceC)),
        ("segments", POINTER(SegmentC)),
        ("hidden", c_void_p),
    )


class HeadC(Structure):
    """Hidden states to project on the vocabulary."""

    _fields_ = (
        *_fields(c_int64, "num_rows", "num_segments"),
        ("hidden", c_void_p),
        ("segments", POINTER(SegmentC)),
        ("logits", c_void_p),
    )


class DrawC(Structure):
    """Rows to draw a token from."""

    _fields_ = (
        *_fields(c_int64, "num_rows", "vocab"),
        *_fields(c_void_p, "logits", "temperatures", "top_ks", "top_ps", "uniforms"),
        *_fields(c_void_p, "tokens", "logprobs", "log_normalizers"),
    )


class TenantC(Structure):
    """The rows of one tenant in a training pass, and its LoRA by part; NULL where there is none or none is trained."""

    _fields_ = (
        *_fields(c_int64, "first_row", "num_rows", "rank"),
        ("scale", c_double),
        *_fields(c_void_p * MAX_PARTS, "a", "b", "grad_a", "grad_b"),
    )


class LoraPassC(Structure):
    """LoRA of projections that share an input, in a training pass."""

    _fields_ = (
        *_fields(c_int64, "inputs", "num_parts", "num_tenants", "max_rank"),
        *_fields(c_int64 * MAX_PARTS, "first_column", "outputs"),
        ("tenants", POINTER(TenantC)),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("shrunk", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("grad_out", c_void_p),
        ("grad_out_stride", c_int64),
        *_fields(c_void_p, "shrunk_grad", "grad_x"),
        ("grad_x_stride", c_int64),
    )
