"""Parses PEFT's ``adapter_config.json``; what cannot be honoured exactly is rejected with an error that names the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tinkex.errors import InvalidInput

__all__ = ["CONFIG_FILE", "MAX_CONFIG_BYTES", "WEIGHTS_FILE", "AdapterConfig"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20

# Fields about how an adapter was made, or that the tensors show themselves. Every other field must be unset, null or
# empty, because it would change what the adapter computes.
_IGNORED = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Other initializations subtract the initial adapter from the base weights, so the adapter does not fit the original base.
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
# A pattern is matched against every module's name. These bounds limit the time of any pattern.
_MAX_PATTERN_LENGTH = 300
_MAX_REPETITIONS = 3
_REPETITION = re.compile(r"(?<!\\)[*+?{]")
_NESTED_REPETITION = re.compile(r"\)[*+?{]")


@dataclass(frozen=True)
class AdapterConfig:
    """The rank and the scale of every module of an adapter.

    Example:
        >>> config = AdapterConfig.read(Path("my-adapter"))
        >>> config.rank_of("model.layers.0.self_attn.q_proj"), config.scale_of("model.layers.0.self_attn.q_proj")
        (8, 2.0)
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    """Whether alpha is divided by √rank instead of the rank."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    declared_base: str | None = None
    """The base model that the config names, if any."""

    @classmethod
    def read(cls, directory: Path) -> AdapterConfig:
        """Reads the config of a PEFT directory; raises ``InvalidInput`` for anything but plain LoRA."""
        config = _read_json(directory)
        _reject_unsupported(config)
        rank, alpha = config.get("r"), config.get("lora_alpha", 8)
        if not _is_rank(rank):
            raise InvalidInput(f"r {rank!r} of this adapter must be a positive integer")
        if not _is_alpha(alpha):
            raise InvalidInput(f"lora_alpha {alpha!r} of this adapter must be a finite number")
        ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        _check_pattern("rank_pattern", ranks, _is_rank, "positive integers")
        _check_pattern("alpha_pattern", alphas, _is_alpha, "finite numbers")
        return cls(
            rank=rank,
            alpha=float(alpha),
            rank_stabilized=bool(config.get("use_rslora")),
            rank_pattern=ranks,
            alpha_pattern={pattern: float(value) for pattern, value in alphas.items()},
            declared_base=str(config.get("base_model_name_or_path") or "") or None,
        )

    @property
    def uniform(self) -> bool:
        """Whether all modules have one rank and one alpha."""
        return not self.rank_pattern and not self.alpha_pattern

    def rank_of(self, module: str) -> int:
        """The rank of a module, given by its full name in the base model."""
        return int(_first_match(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of the low-rank product of a module."""
        rank = self.rank_of(module)
        return _first_match(self.alpha_pattern, module, self.alpha) / (
            math.sqrt(rank) if self.rank_stabilized else rank
        )


def _first_match(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches a whole name, or its suffix after a dot."""
    for pattern, value in patterns.items():
        if _compile(pattern).match(module):
            return value
    return default


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _read_json(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidInput(
                f"{path} is larger than {MAX_CONFIG_BYTES} bytes, so it is not an adapter config"
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidInput(f"{directory} is not a PEFT adapter: it has no {CONFIG_FILE}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} must contain a JSON object")
    return config


def _reject_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise InvalidInput(f"peft_type {config.get('peft_type')!r} is not supported; only LORA adapters are")
    if config.get("bias", "none") != "none":
        raise InvalidInput(f"bias {config['bias']!r} of this adapter is not supported; only 'none' is")
    initialization = config.get("init_lora_weights", True)
    if initialization not in _INITIALIZATIONS:
        raise InvalidInput(
            f"init_lora_weights {initialization!r} of this adapter changed its base model; convert it to a plain LoRA first"
        )
    unsupported = sorted(name for name, value in config.items() if value and name not in _IGNORED)
    if unsupported:
        raise InvalidInput(
            f"{', '.join(unsupported)} of this adapter cannot be honoured; only plain LoRA adapters load"
        )


def _is_rank(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_alpha(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_pattern(field: str, patterns: object, is_valid: Any, kind: str) -> None:
    if not isinstance(patterns, dict) or not all(map(is_valid, patterns.values())):
        raise InvalidInput(
            f"{field} of this adapter must map names of modules to {kind}, and is {patterns!r}"
        )
    for pattern in patterns:
        if (
            len(pattern) > _MAX_PATTERN_LENGTH
            or len(_REPETITION.findall(pattern)) > _MAX_REPETITIONS
            or _NESTED_REPETITION.search(pattern)
        ):
            raise InvalidInput(
                f"{field} of this adapter has the pattern {pattern[:80]!r}, which is too complex to match against every "
                "module; use simpler patterns"
            )
        try:
            _compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidInput(f"{field} of this adapter has the pattern {pattern!r}: {error}") from error
