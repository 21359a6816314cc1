"""The allow-list of operations of custom losses, each with a bound on the size of its results.

Everything that is not listed is rejected: operations that work in place, are random, leave torch, access files or other
devices, or whose cost cannot be computed from their arguments.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tinkex.engine.trainer import loss_sizes as sizes
from tinkex.engine.trainer.loss_division import checked_division

__all__ = [
    "ATTRIBUTES",
    "DTYPES",
    "METHODS",
    "NAMESPACES",
    "REJECTED_KEYWORDS",
    "STRINGS",
    "AllowedOp",
    "find_function",
]


@dataclass(frozen=True)
class AllowedOp:
    """One allowed call: the function, a bound on the size of its results, and the arguments it takes.

    ``max_positional`` excludes an argument that is not allowed, such as ``inplace`` or ``out``; ``keywords`` of None
    allows all but ``REJECTED_KEYWORDS``. ``plain`` marks Python's operators, which work on more than tensors. ``slowness`` is
    how much longer an element takes than one that is only read and written.
    """

    call: Callable[..., Any] = field(repr=False)
    size: sizes.Sizing = field(default=sizes.same_or_broadcast, repr=False)
    max_positional: int | None = None
    keywords: frozenset[str] | None = None
    plain: bool = False
    slowness: int = 1


DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        name: getattr(torch, name)
        for name in (
            *("float32", "float64", "float16", "bfloat16"),
            *("int64", "int32", "int16", "int8", "uint8", "bool"),
        )
    }
)

ATTRIBUTES = frozenset({"T", "data", "device", "dtype", "indices", "mT", "ndim", "shape", "values"})
"""Attributes that can be read; ``data`` is a detached tensor."""

REJECTED_KEYWORDS = frozenset(
    {"generator", "inplace", "layout", "names", "out", "pin_memory", "requires_grad"}
)
"""Arguments that must be omitted, None or False."""

STRINGS = frozenset(
    [
        *("none", "mean", "sum", "batchmean"),  # how a loss is reduced
        *("floor", "trunc"),  # how a division is rounded
        *("ij", "xy"),  # how a grid is laid out
        *("constant", "reflect", "replicate", "circular"),  # how a tensor is padded
        *("linear", "lower", "higher", "midpoint", "nearest"),  # how quantiles are interpolated
        *("left", "right"),  # which side of a boundary
        *("fro", "tanh"),  # a norm, an approximation of gelu
        "cpu",  # where tensors are
    ]
)
"""The strings that an argument can be, except the equation of einsum."""

_POINTWISE = """
    abs absolute acos acosh add addcdiv addcmul arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
    atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh
    deg2rad digamma eq erf erfc erfinv exp exp2 expm1 fix float_power floor fmax fmin
    frac ge greater greater_equal gt heaviside hypot isclose isfinite isinf isnan isneginf isposinf le lerp less
    less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    lt maximum minimum mul multiply nan_to_num ne neg negative not_equal positive pow rad2deg reciprocal relu
    round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh true_divide trunc
    xlogy masked_fill softmax log_softmax
"""
_REDUCING = """
    all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod cumsum dist logcumsumexp logsumexp
    max mean min nanmean nansum norm prod std sum var
"""
_SHAPING = """
    clone detach diagonal flatten flip moveaxis movedim narrow permute ravel reshape roll select squeeze swapaxes
    swapdims t transpose tril triu unflatten unsqueeze
"""
_PICKING = """
    gather index_add index_copy index_fill masked_scatter masked_select scatter scatter_add take take_along_dim
"""
_SORTING = "argsort median msort nanmedian sort topk"
_POSITIONS = "argwhere nonzero where"
_CUTTING: Mapping[str, sizes.Sizing] = {
    "chunk": sizes.chunked,
    "split": sizes.divided,
    "unbind": sizes.unbound,
}
_QUANTILES = "nanquantile quantile"

_LARGER: Mapping[str, AllowedOp] = {
    # functions and methods of the same name whose results can be larger than their arguments
    "bmm": AllowedOp(torch.bmm, sizes.product),
    "broadcast_to": AllowedOp(torch.broadcast_to, sizes.widened),
    # The second argument is how many times it is applied.
    "diff": AllowedOp(torch.diff, sizes.joined, 1, frozenset({"dim", "prepend", "append"})),
    "dot": AllowedOp(torch.dot, sizes.product),
    "index_select": AllowedOp(torch.index_select, sizes.selected),
    "inner": AllowedOp(torch.inner, sizes.inner),
    "matmul": AllowedOp(torch.matmul, sizes.product),
    "mm": AllowedOp(torch.mm, sizes.product),
    "mv": AllowedOp(torch.mv, sizes.product),
    "outer": AllowedOp(torch.outer, sizes.pairs),
    "repeat_interleave": AllowedOp(torch.repeat_interleave, sizes.interleaved),
    "tile": AllowedOp(torch.tile, sizes.repeated),
}


_SLOWNESS = {
    name: factor
    for factor, names in {
        64: "logcumsumexp logit",
        32: "i0 i0e i1 i1e",
        16: "bucketize digamma log_ndtr psi searchsorted",
        8: """
            acos acosh arccos arccosh arcsin arcsinh arctan2 asin asinh atan2 binary_cross_entropy entr erf erfc erfcx
            erfinv float_power gammaln hinge_embedding_loss kl_div lgamma log10 log2 logaddexp logaddexp2 mish ndtr ndtri
            norm poisson_nll_loss pow sinc soft_margin_loss xlog1py xlogy
        """,
    }.items()
    for name in names.split()
}  # measured on one core, forward and backward


def _listed(names: str, where: object, size: sizes.Sizing = sizes.same_or_broadcast) -> dict[str, AllowedOp]:
    return {
        name: AllowedOp(getattr(where, name), size, slowness=_SLOWNESS.get(name, 1)) for name in names.split()
    }


def _dividing(where: object) -> dict[str, AllowedOp]:
    """The divisions that round, which are checked."""
    floats = {name: checked_division(getattr(where, name), only_rounded=True) for name in ("div", "divide")}
    whole = {name: checked_division(getattr(where, name)) for name in ("floor_divide", "fmod", "remainder")}
    return {name: AllowedOp(call, slowness=8) for name, call in {**floats, **whole}.items()}


_SHARED = " ".join((_POINTWISE, _REDUCING, _SHAPING, _PICKING))

_TORCH: Mapping[str, AllowedOp] = {
    **_listed(_SHARED, torch),
    **_dividing(torch),
    **_listed(_SORTING, torch, sizes.many_passes),
    **_listed(_QUANTILES, torch, sizes.quantiles),
    **_listed(_POSITIONS, torch, sizes.positions),
    **{name: AllowedOp(getattr(torch, name), size) for name, size in _CUTTING.items()},
    **_LARGER,
    **_listed("full_like numel ones_like zeros_like std_mean var_mean", torch),
    **_listed("cosine_similarity pairwise_distance bucketize searchsorted", torch),
    **_listed("cat column_stack concat concatenate dstack hstack stack vstack", torch, sizes.joined),
    "arange": AllowedOp(torch.arange, sizes.counted),
    "broadcast_tensors": AllowedOp(torch.broadcast_tensors, sizes.broadcast_all),
    "einsum": AllowedOp(torch.einsum, sizes.contracted),
    "eye": AllowedOp(torch.eye, sizes.square),
    "full": AllowedOp(torch.full, sizes.filled),
    "linspace": AllowedOp(torch.linspace, sizes.spaced),
    "meshgrid": AllowedOp(torch.meshgrid, sizes.grid),
    "norm": AllowedOp(torch.norm, max_positional=4),
    "ones": AllowedOp(torch.ones, sizes.shape),
    "zeros": AllowedOp(torch.zeros, sizes.shape),
}

_IN_PLACE_AFTER = {  # functions whose argument after these would overwrite a tensor
    "celu": 2, "elu": 2, "hardsigmoid": 1, "hardswish": 1, "hardtanh": 3, "leaky_relu": 2, "mish": 1, "normalize": 4,
    "relu": 1, "relu6": 1, "selu": 1, "silu": 1, "threshold": 3,
}  # fmt: skip

_NN: Mapping[str, AllowedOp] = {
    **_listed(
        """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity cross_entropy
        gaussian_nll_loss gelu hardshrink hinge_embedding_loss huber_loss kl_div l1_loss log_softmax logsigmoid
        margin_ranking_loss mse_loss nll_loss pairwise_distance poisson_nll_loss sigmoid smooth_l1_loss
        soft_margin_loss softmax softmin softplus softshrink softsign tanh tanhshrink
        """,
        functional,
    ),
    **{name: AllowedOp(getattr(functional, name), max_positional=n) for name, n in _IN_PLACE_AFTER.items()},
    "log_sigmoid": AllowedOp(functional.logsigmoid),
    "one_hot": AllowedOp(functional.one_hot, sizes.encoded),
    "pad": AllowedOp(functional.pad, sizes.padded),
}

_SPECIAL = _listed(
    """
    digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 i0e i1 i1e log1p log_ndtr log_softmax logit
    logsumexp ndtr ndtri psi round sinc softmax xlog1py xlogy
    """,
    torch.special,
)

_LINALG: Mapping[str, AllowedOp] = {
    "norm": AllowedOp(torch.linalg.norm, sizes.vector_norm),
    "vector_norm": AllowedOp(torch.linalg.vector_norm),
    "vecdot": AllowedOp(torch.linalg.vecdot),
}

_MATH = _listed(
    """
    acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs floor fmod hypot
    isclose isfinite isinf isnan log log10 log1p log2 pow radians sin sinh sqrt tan tanh trunc
    """,
    math,
)

_MAX_BITS = 63


def _power(base: Any, exponent: Any) -> Any:
    integers = isinstance(base, int) and isinstance(exponent, int)
    if integers and exponent > 0 and base.bit_length() * exponent > 2 * _MAX_BITS:
        raise ValueError(f"{base} to the power of {exponent} is too large")
    return base**exponent


_OPERATOR: Mapping[str, AllowedOp] = {
    **{
        name: AllowedOp(getattr(operator, name), plain=True)
        for name in (
            *(
                "abs",
                "add",
                "and_",
                "eq",
                "ge",
                "gt",
                "inv",
                "invert",
                "le",
                "lt",
                "mul",
                "ne",
            ),
            *("neg", "not_", "or_", "pos", "sub", "truediv", "truth", "xor"),
        )
    },
    "floordiv": AllowedOp(checked_division(operator.floordiv), plain=True, slowness=8),
    "mod": AllowedOp(checked_division(operator.mod), plain=True, slowness=8),
    "getitem": AllowedOp(operator.getitem, sizes.indexed, plain=True),
    "matmul": AllowedOp(operator.matmul, sizes.product, plain=True),
    "pow": AllowedOp(_power, plain=True, slowness=8),
}

NAMESPACES: tuple[tuple[str, Mapping[str, AllowedOp]], ...] = (
    # the longest first; torch names a function by the module that defines it
    ("torch._C._special.special_", _SPECIAL),
    ("torch._C._linalg.linalg_", _LINALG),
    ("torch.nn.functional.", _NN),
    ("torch._C._nn.", _NN),
    ("torch.functional.", _TORCH),
    ("torch.special.", _SPECIAL),
    ("torch.linalg.", _LINALG),
    ("torch.", _TORCH),
    ("_operator.", _OPERATOR),
    ("operator.", _OPERATOR),
    ("math.", _MATH),
)

METHODS: Mapping[str, AllowedOp] = MappingProxyType(
    {
        **_listed(_SHARED, Tensor),
        **_dividing(Tensor),
        **_listed(_SORTING, Tensor, sizes.many_passes),
        **_listed(_QUANTILES, Tensor, sizes.quantiles),
        **_listed(_POSITIONS, Tensor, sizes.positions),
        **{name: AllowedOp(getattr(Tensor, name), size) for name, size in _CUTTING.items()},
        **{
            name: AllowedOp(getattr(Tensor, name), larger.size, larger.max_positional, larger.keywords)
            for name, larger in _LARGER.items()
        },
        **_listed("bfloat16 bool cpu double float half int long short to type type_as", Tensor),
        **_listed("contiguous dim is_floating_point ndimension nelement numel size", Tensor),
        **_listed("expand_as reshape_as view_as", Tensor),
        "view": AllowedOp(Tensor.view, sizes.reshaped),
        "expand": AllowedOp(Tensor.expand, sizes.widened),
        "new_full": AllowedOp(Tensor.new_full, sizes.fresh_filled),
        "new_tensor": AllowedOp(Tensor.new_tensor, sizes.joined),
        "new_ones": AllowedOp(Tensor.new_ones, sizes.fresh),
        "new_zeros": AllowedOp(Tensor.new_zeros, sizes.fresh),
        "repeat": AllowedOp(Tensor.repeat, sizes.repeated),
        "unfold": AllowedOp(Tensor.unfold, sizes.windowed),
    }
)
"""The methods of a tensor that are allowed, by name."""


def find_function(target: str) -> AllowedOp | None:
    """The allowed function of a qualified name, or None.

    >>> find_function("torch._C._nn.softplus") is find_function("torch.nn.functional.softplus")
    True
    >>> find_function("torch.load") is None
    True
    """
    for prefix, ops in NAMESPACES:
        if target.startswith(prefix):
            return ops.get(target.removeprefix(prefix))
    return None
