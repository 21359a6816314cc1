"""The settings of a training run: validated at construction, and stored with the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from tinkex.errors import ConfigError

__all__ = ["DpoSettings", "GrpoSettings", "Schedule", "Settings", "SftSettings", "TooLong", "settings_from"]

Schedule = Literal["constant", "linear", "cosine"]
TooLong = Literal["error", "skip", "cut"]
PATHS = frozenset({"data", "output", "eval_data"})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of all recipes. The defaults suit a model of about 100 million parameters on a laptop."""

    recipe: ClassVar[str] = ""

    data: Path
    output: Path
    model: str | None = None
    """Base model; None: the server's only one, or the small one for laptops."""
    start_from: str | None = None
    """A checkpoint to start from instead of a new adapter."""
    rank: int = 16
    learning_rate: float = 1e-3
    schedule: Schedule = "linear"
    warmup_steps: int = 0
    batch_size: int = 4
    epochs: int = 3
    steps: int | None = None
    """Total number of steps; None: as many as the epochs take."""
    max_length: int = 1024
    """Maximum number of tokens of one example."""
    too_long: TooLong = "error"
    chat: bool | None = None
    """Whether plain text is sent as chat messages; None: if the model has a chat template."""
    eval_data: Path | None = None
    eval_fraction: float = 0.1
    """Fraction of the data that is held out for evaluation, if there is no ``eval_data``."""
    eval_every: int | None = None
    """Steps between evaluations; None: after every epoch."""
    save_every: int | None = None
    """Steps between checkpoints; None: only at the end (and when interrupted)."""
    ttl_seconds: int | None = None
    """Time to live of intermediate checkpoints; the final ones do not expire."""
    seed: int = 0
    sample_prompts: tuple[str, ...] = ()
    """Prompts sampled before and after; empty: the first ones of the data."""
    sample_tokens: int = 64

    def __post_init__(self) -> None:
        for name in PATHS:
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, Path(value))
        object.__setattr__(self, "sample_prompts", tuple(self.sample_prompts))
        for name in ("rank", "batch_size", "epochs", "max_length", "sample_tokens"):
            _at_least(self, name, 1)
        for name in ("steps", "eval_every", "save_every", "ttl_seconds"):
            if getattr(self, name) is not None:
                _at_least(self, name, 1)
        _at_least(self, "warmup_steps", 0)
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"learning_rate must be a positive number, got {self.learning_rate}")
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"eval_fraction must be at least 0 and below 1, got {self.eval_fraction}")

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as plain values, for JSON."""
        plain = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items()}
        return {"recipe": self.recipe, **plain}


@dataclass(frozen=True, kw_only=True)
class SftSettings(Settings):
    """Supervised fine-tuning: the model is trained on the answers in the data.

    >>> SftSettings(data=Path("chats.jsonl"), output=Path("run")).learning_rate
    0.001
    """

    recipe: ClassVar[str] = "sft"

    train_on: Literal["last", "all"] = "last"
    """The assistant messages to train on."""


@dataclass(frozen=True, kw_only=True)
class DpoSettings(Settings):
    """Direct preference optimization: the chosen answer becomes more likely than the rejected one.

    >>> DpoSettings(data=Path("pairs.jsonl"), output=Path("run")).beta
    0.1
    """

    recipe: ClassVar[str] = "dpo"

    learning_rate: float = 2e-4
    beta: float = 0.1
    """Strength of the penalty on moving away from the reference model."""
    sft_weight: float = 1.0
    """Weight of the cross-entropy per token of the chosen answers, which keeps their likelihood from falling too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.beta) and self.beta > 0):
            raise ConfigError(f"beta must be a positive number, got {self.beta}")
        if not (math.isfinite(self.sft_weight) and self.sft_weight >= 0):
            raise ConfigError(f"sft_weight must be at least 0, got {self.sft_weight}")


@dataclass(frozen=True, kw_only=True)
class GrpoSettings(Settings):
    """Group-relative policy optimization: of several answers to a prompt, those above the group's mean become more likely.

    >>> GrpoSettings(data=Path("prompts.jsonl"), output=Path("run"), reward_regex="42").group_size
    8
    """

    recipe: ClassVar[str] = "grpo"

    learning_rate: float = 3e-4
    schedule: Schedule = "constant"
    reward: str | None = None
    """``file.py:function``, called with any of ``prompt``, ``completion`` and ``example`` by name."""
    reward_regex: str | None = None
    """A regular expression: an answer that contains a match gets reward 1, any other 0."""
    group_size: int = 8
    max_tokens: int = 64
    """Maximum number of tokens of one answer."""
    loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    normalize_advantages: bool = True
    """Whether a group's advantages are divided by their standard deviation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, "group_size", 2)
        _at_least(self, "max_tokens", 1)
        if (self.reward is None) == (self.reward_regex is None):
            raise ConfigError("set exactly one of reward='file.py:function' and reward_regex")


RECIPES: Mapping[str, type[Settings]] = {
    kind.recipe: kind for kind in (SftSettings, DpoSettings, GrpoSettings)
}


def settings_from(plain: Mapping[str, Any]) -> Settings:
    """Builds settings from the values of :meth:`Settings.as_json`.

    >>> kept = SftSettings(data=Path("a.jsonl"), output=Path("run")).as_json()
    >>> settings_from(kept).data.name
    'a.jsonl'
    """
    kind = RECIPES[str(plain["recipe"])]
    names = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in plain.items() if name in names})


def _at_least(settings: Settings, name: str, minimum: int) -> None:
    value = getattr(settings, name)
    if value < minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {value}")
