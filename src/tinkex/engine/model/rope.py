"""Rotary position embeddings, in every variant the supported families use.

Shapes: T packed rows, H heads, d head dimension, h = d / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.engine.model.config_fields import flag, integer, mapping, number
from tinkex.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["RopeConfig", "Rotary", "rotate"]

_DEFAULT_THETA = 10_000.0

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_PARAMETERS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of a model, as its ``config.json`` describes it.

    ``kind`` is one of ``default``, ``linear``, ``dynamic``, ``llama3`` and ``yarn``. ``dynamic`` changes the frequencies
    only beyond the training length, which the engine never exceeds, so it is the same as ``default``.

    Example:
        >>> RopeConfig.from_config({"rope_theta": 100000.0, "max_position_embeddings": 8192}).theta
        100000.0
    """

    kind: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Parses ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``; raises ``SetupError`` for others."""
        raw = mapping(config, "rope_scaling") or mapping(config, "rope_parameters")
        if any(isinstance(value, dict) for value in raw.values()):
            raise SetupError(
                f"this model's config.json has different rope parameters per layer type ({', '.join(sorted(raw))}), "
                "which is not supported; use a model whose layers share them"
            )
        kind = str(raw.get("rope_type") or raw.get("type") or "default")
        if kind not in _PARAMETERS:
            raise SetupError(
                f"rope type {kind!r} in this model's config.json is not supported; supported are: "
                f"{', '.join(_PARAMETERS)}"
            )
        unknown = {name for name, value in raw.items() if value is not None} - _PARAMETERS[kind] - _COMMON
        if unknown:
            raise SetupError(
                f"rope parameter {', '.join(map(repr, sorted(unknown)))} of rope type {kind!r} in this model's "
                "config.json is not supported; remove it if the model does not need it"
            )
        missing = [name for name in _REQUIRED[kind] if raw.get(name) is None]
        if missing:
            raise SetupError(f"rope type {kind!r} in this model's config.json lacks {', '.join(missing)}")
        partial = number({**config, **_not_null(raw)}, "partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise SetupError(
                f"partial_rotary_factor {partial} in this model's config.json is not supported; only whole heads are rotated"
            )
        theta = number({**config, **_not_null(raw)}, "rope_theta", _DEFAULT_THETA, above=1.0)
        context = integer(config, "max_position_embeddings", 2048)
        original = integer({**raw, **_not_null(config)}, "original_max_position_embeddings", context)
        factor = number(raw, "factor", context / original, minimum=1e-3)
        low, high = number(raw, "low_freq_factor", 1.0), number(raw, "high_freq_factor", 4.0)
        if low >= high:
            raise SetupError(
                f"low_freq_factor in this model's config.json is {low:g}, high_freq_factor {high:g}; it must be the smaller one"
            )
        return cls(
            kind=kind,
            theta=theta,
            factor=factor,
            original_context=original,
            low_freq_factor=low,
            high_freq_factor=high,
            beta_fast=number(raw, "beta_fast", 32.0),
            beta_slow=number(raw, "beta_slow", 1.0),
            attention_factor=_attention_factor(raw, factor) if kind == "yarn" else 1.0,
            truncate=flag(raw, "truncate", default=True),
        )


def _not_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not null."""
    return {name: value for name, value in values.items() if value is not None}


def _attention_factor(raw: Mapping[str, Any], factor: float) -> float:
    """YaRN's factor of cos and sin, from the config or derived from the context extension."""
    if raw.get("attention_factor") is not None:
        return number(raw, "attention_factor", 1.0)

    def mscale_factor(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = (
        number(raw, "mscale", 0.0, minimum=0.0),
        number(raw, "mscale_all_dim", 0.0, minimum=0.0),
    )
    if mscale and mscale_all_dim:
        return mscale_factor(mscale) / mscale_factor(mscale_all_dim)
    return mscale_factor(1.0)


_MIN_CACHED, _MAX_CACHED = 1 << 10, 1 << 15


class Rotary:
    """Computes the cosines and sines that ``rotate`` applies.

    The frequencies are computed in fp32, as in training: at position 8,000 one unit in the last place of a frequency is
    already a visible angle.

    Example:
        >>> cos, sin = Rotary(RopeConfig(), head_dim=64)(torch.arange(5))
        >>> cos.shape
        torch.Size([5, 1, 32])
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self.inverse_frequencies_h = _inverse_frequencies(config, head_dim)
        self.scale = config.attention_factor
        self._cached = self._compute(0)

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (T, 1, h) each, to be broadcast over heads.

        Those of the first positions are cached: torch's trigonometric functions wake all its threads even for a few rows,
        and these would then spin for longer than a decode step takes.
        """
        num_positions = int(positions_T.max()) + 1 if len(positions_T) else 0
        if num_positions > _MAX_CACHED:
            return self._at(positions_T)
        cached = self._cached
        if len(cached[0]) < num_positions:
            cached = self._cached = self._compute(max(_MIN_CACHED, 1 << (num_positions - 1).bit_length()))
        cos, sin = cached
        return cos[positions_T], sin[positions_T]

    def _compute(self, count: int) -> tuple[Tensor, Tensor]:
        import torch

        return self._at(torch.arange(count))

    def _at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        angles_T1h = (positions_T.float()[:, None] * self.inverse_frequencies_h)[:, None, :]
        cos, sin = angles_T1h.cos(), angles_T1h.sin()
        return (cos, sin) if self.scale == 1.0 else (cos * self.scale, sin * self.scale)


def rotate(x_THd: Tensor, cos_T1h: Tensor, sin_T1h: Tensor) -> Tensor:
    """Rotates every head: its first half is paired with its second half."""
    import torch

    first, second = x_THd.chunk(2, dim=-1)
    return torch.cat((first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h), dim=-1)


def _inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    import torch

    wavelengths_h: Tensor = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain_h = 1.0 / wavelengths_h
    if config.kind == "linear":
        return plain_h / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain_h)
    if config.kind == "yarn":
        return _yarn(config, wavelengths_h, head_dim)
    return plain_h


def _llama3(config: RopeConfig, plain_h: Tensor) -> Tensor:
    """Low frequencies are divided by ``factor``, high ones kept, those between interpolated."""
    import torch

    turns_h = config.original_context * plain_h / (2 * math.pi)  # full turns within the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    keep_h = torch.clamp((turns_h - low) / (high - low), 0.0, 1.0)
    return (1 - keep_h) * plain_h / config.factor + keep_h * plain_h


def _yarn(config: RopeConfig, wavelengths_h: Tensor, head_dim: int) -> Tensor:
    """Like llama3, but the interpolation is a linear ramp over dimensions."""
    import torch

    def dimension_with(turns: float) -> float:
        return (
            head_dim
            * math.log(config.original_context / (turns * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = dimension_with(config.beta_fast), dimension_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # an empty ramp is a step
    ramp_h = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0.0, 1.0)
    return (1.0 / (config.factor * wavelengths_h)) * ramp_h + (1.0 / wavelengths_h) * (1 - ramp_h)
