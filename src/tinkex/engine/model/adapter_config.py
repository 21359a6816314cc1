"""What an ``adapter_config.json`` of PEFT says, as far as it can be honoured exactly; the rest is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tinkex.errors import InvalidInput

__all__ = ["CONFIG_FILE", "MAX_CONFIG_BYTES", "AdapterConfig"]

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20

# Fields that say how an adapter came to be, or what the tensors themselves show. Every other field must be
# unset, null or empty, because it would change what the adapter computes.
_HARMLESS = frozenset(
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
# Other initialisations take their start out of the base weights, so the adapter does not fit the base as it is.
_HARMLESS_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
# A pattern is tried on every module's name. These bounds keep the time that takes small, whatever it says.
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
    rank_stabilised: bool
    """Whether alpha is divided by √rank instead of the rank."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    declared_base: str | None = None
    """The base model it names, if any."""

    @classmethod
    def read(cls, directory: Path) -> AdapterConfig:
        """Reads the config of a PEFT directory; refuses what would compute something else than plain LoRA."""
        config = _read_json(directory)
        _refuse_unsupported(config)
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
            rank_stabilised=bool(config.get("use_rslora")),
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
        """What the low-rank product of a module is multiplied by."""
        rank = self.rank_of(module)
        return _first_match(self.alpha_pattern, module, self.alpha) / (
            math.sqrt(rank) if self.rank_stabilised else rank
        )


def _first_match(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """The value of the first pattern that matches a whole name, or its end after a dot."""
    for pattern, value in patterns.items():
        if _whole(pattern).match(module):
            return value
    return otherwise


def _whole(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _read_json(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidInput(f"{path} is larger than {MAX_CONFIG_BYTES} bytes, so it is no adapter config")
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidInput(f"{directory} is not a PEFT adapter: it has no {CONFIG_FILE}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} must hold a JSON object")
    return config


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise InvalidInput(f"peft_type {config.get('peft_type')!r} is not supported; only LORA adapters are")
    if config.get("bias", "none") != "none":
        raise InvalidInput(f"bias {config['bias']!r} of this adapter is not supported; only 'none' is")
    initialisation = config.get("init_lora_weights", True)
    if initialisation not in _HARMLESS_INITIALISATIONS:
        raise InvalidInput(
            f"init_lora_weights {initialisation!r} of this adapter changed its base model; convert it to a plain LoRA first"
        )
    refused = sorted(name for name, value in config.items() if value and name not in _HARMLESS)
    if refused:
        raise InvalidInput(
            f"{', '.join(refused)} of this adapter cannot be honoured; only plain LoRA adapters load"
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
                f"{field} of this adapter has the pattern {pattern[:80]!r}, which is too involved to be tried on every "
                "module; name the modules with simpler patterns"
            )
        try:
            _whole(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidInput(f"{field} of this adapter has the pattern {pattern!r}: {error}") from error
