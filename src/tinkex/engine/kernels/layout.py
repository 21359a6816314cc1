"""The structures Python hands to the core, field by field as ``csrc/core.h`` has them."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_int64, c_void_p

__all__ = ["DrawC", "HeadC", "LayerC", "ModelC", "PairC", "PassC", "SegmentC", "SequenceC"]


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class LayerC(Structure):
    """One layer's weights; a bias or norm the family does not have is NULL."""

    _fields_ = (
        *_fields(c_void_p, "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias"),
        *_fields(c_void_p, "mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
        ("window", c_int64),
    )


class ModelC(Structure):
    """A model's shape and where its weights are."""

    _fields_ = (
        *_fields(c_int64, "num_layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocab"),
        ("norm_eps", c_double),
        *_fields(c_void_p, "embedding", "final_norm", "unembedding"),
        ("layers", POINTER(LayerC)),
    )


class PairC(Structure):
    """One projection's low-rank pair; NULL where an adapter does not reach it."""

    _fields_ = tuple(_fields(c_void_p, "a", "b"))


class SegmentC(Structure):
    """Neighbouring rows that share an adapter."""

    _fields_ = (
        *_fields(c_int64, "first_row", "num_rows", "rank"),
        ("scale", c_double),
        ("pairs", POINTER(PairC)),
    )


class SequenceC(Structure):
    """Neighbouring rows that continue one sequence, and where its keys and values lie; strides count floats."""

    _fields_ = (
        *_fields(c_int64, "first_row", "num_rows", "position"),
        ("keys", c_void_p),
        *_fields(c_int64, "layer_stride", "value_offset", "head_stride"),
        ("shared_keys", c_void_p),
        *_fields(c_int64, "num_shared", "shared_layer_stride", "shared_value_offset", "shared_head_stride"),
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
    """Hidden states whose logits are wanted."""

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
