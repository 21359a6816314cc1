"""The settings of a training run: validated at construction, and stored with the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from tinkex.errors import ConfigError

__all__ = ["DpoSettings", "GrpoSettings", "Schedule", "Settings", "SftSettings", "TooLong", "settings_from"]

Schedule = Literal["constant", "linear", "cosine"]
TooLong = Literal["error", "skip", "cut"]
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
PATHS = frozenset({"data", "output", "eval_data"})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of all recipes. The defaults suit a model of about 100 million parameters on a laptop."""

    recipe: ClassVar[str] = ""

    data: Path
    """A JSON lines, JSON, CSV or Parquet file, a dataset directory, or the name of a dataset of the Hub."""
    output: Path
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of the data by the name they are used as: ``{"prompt": "title"}``; others are recognised by name."""
    model: str | None = None
    """Base model; None: the server's only one, or the small one for laptops."""
    start_from: str | None = None
    """A checkpoint to start from instead of a new adapter."""
    rank: int = 16
    learning_rate: float = 1e-3
    schedule: Schedule = "linear"
    warmup_steps: int = 0
    batch_size: int = 4
    accumulate: int = 1
    """Batches per step: their gradients are added before the optimizer step."""
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
    eval_tasks: tuple[str, ...] = ()
    """Task files that the model is evaluated on before and after training; used by the command line."""
    eval_every: int | None = None
    """Steps between evaluations; None: after every epoch."""
    keep_best: bool = False
    """Whether the result is the checkpoint with the best evaluation instead of the last one."""
    early_stop: int | None = None
    """Stop after this many evaluations in a row that are no better than the best one."""
    save_every: int | None = None
    """Steps between checkpoints; None: only at the end (and when interrupted)."""
    ttl_seconds: int | None = None
    """Time to live of intermediate checkpoints; the final ones do not expire."""
    seed: int = 0
    sample_prompts: tuple[str, ...] = ()
    """Prompts sampled before and after; empty: the first ones of the data."""
    sample_tokens: int = 64
    track: tuple[str, ...] = ()
    """Experiment trackers that also get the metrics: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``."""
    report: bool = False
    """Whether the report is also written as ``report.html``: one file with curves and samples, to mail."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in PATHS and isinstance(value, str):
                object.__setattr__(self, one.name, Path(value))
            elif isinstance(value, list):  # of a TOML or JSON file
                object.__setattr__(self, one.name, tuple(value))
        if isinstance(self.eval_tasks, tuple):
            object.__setattr__(self, "eval_tasks", tuple(str(task) for task in self.eval_tasks))
        _check_types(self)
        object.__setattr__(self, "columns", dict(self.columns))
        for name in ("rank", "batch_size", "accumulate", "epochs", "max_length", "sample_tokens"):
            _at_least(self, name, 1)
        for name in ("steps", "eval_every", "early_stop", "save_every", "ttl_seconds"):
            if getattr(self, name) is not None:
                _at_least(self, name, 1)
        _at_least(self, "warmup_steps", 0)
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"learning_rate must be a positive number, got {self.learning_rate}")
        if self.ttl_seconds is not None and self.save_every is None:
            raise ConfigError(
                "--ttl (ttl_seconds=) is for intermediate checkpoints; save some with --save-every (save_every=)"
            )
        for name in self.track:
            if name not in TRACKERS:
                raise ConfigError(f"track has {name!r}; the trackers are {', '.join(TRACKERS)}")
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
    reward: str | tuple[str, ...] = ()
    """Each ``file.py:function`` or ``file.py:function=WEIGHT``, called with any of ``prompt``, ``completion`` and ``example``
    by name. Several are added, each times its weight (1 if none is given)."""
    reward_regex: str | tuple[str, ...] = ()
    """Regular expressions: for each, an answer that contains a match gets reward 1, any other 0; added with weight 1."""
    group_size: int = 8
    max_tokens: int = 64
    """Maximum number of tokens of one answer."""
    loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    normalize_advantages: bool = True
    """Whether a group's advantages are divided by their standard deviation."""
    kl_coef: float = 0.0
    """Weight of the KL penalty on moving away from the model that the run starts from; see :mod:`tinkex.train.grpo`."""

    def __post_init__(self) -> None:
        for name in ("reward", "reward_regex"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
        super().__post_init__()
        _at_least(self, "group_size", 2)
        _at_least(self, "max_tokens", 1)
        if self.max_tokens >= self.max_length:
            raise ConfigError(
                f"max_tokens ({self.max_tokens}) leaves no room for a prompt in max_length ({self.max_length}); raise "
                "--max-length (max_length=) or lower --max-tokens (max_tokens=)"
            )
        if not (math.isfinite(self.kl_coef) and self.kl_coef >= 0):
            raise ConfigError(f"kl_coef must be at least 0, got {self.kl_coef}")
        if not (self.reward or self.reward_regex):
            raise ConfigError(
                "a reward is missing: give --reward FILE.PY:FUNCTION (reward=) or --reward-regex PATTERN (reward_regex=)"
            )


RECIPES: Mapping[str, type[Settings]] = {
    kind.recipe: kind for kind in (SftSettings, DpoSettings, GrpoSettings)
}


def settings_from(plain: Mapping[str, Any]) -> Settings:
    """Builds settings from the values of :meth:`Settings.as_json`.

    >>> kept = SftSettings(data=Path("a.jsonl"), output=Path("run")).as_json()
    >>> settings_from(kept).data.name
    'a.jsonl'
    """
    kind = RECIPES.get(str(plain.get("recipe")))
    if kind is None:
        raise ConfigError(f"recipe must be one of {', '.join(RECIPES)}, got {plain.get('recipe')!r}")
    names = {one.name for one in fields(kind)}
    unknown = sorted(set(plain) - names - {"recipe"})
    if unknown:
        from difflib import get_close_matches

        near = get_close_matches(unknown[0], names, 1)
        raise ConfigError(
            f"{kind.recipe} has no setting {unknown[0]!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    try:
        return kind(**{name: value for name, value in plain.items() if name != "recipe"})
    except TypeError as error:
        raise ConfigError(f"a setting is missing or has the wrong type ({error})") from error


def _check_types(settings: Settings) -> None:
    """Raises ``ConfigError`` for a value of another type: a file may contain anything."""
    hints = get_type_hints(type(settings))
    for one in fields(settings):
        value = getattr(settings, one.name)
        if not _is_a(value, hints[one.name]):
            raise ConfigError(f"{one.name} must be {_words(hints[one.name])}, got {value!r}")


def _is_a(value: object, kind: Any) -> bool:
    """Returns whether a value has this type; an integer is a number too, and a boolean is neither.

    >>> _is_a(3, float), _is_a(True, int), _is_a("b", Literal["a", "b"]), _is_a(("x",), tuple[str, ...])
    (True, False, True, True)
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_is_a(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_a(one, arguments[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _is_a(name, arguments[0]) and _is_a(one, arguments[1]) for name, one in value.items()
        )
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _words(kind: Any) -> str:
    """Returns the name of a type, for messages.

    >>> _words(Literal["a", "b"]), _words(int | None)
    ("'a' or 'b'", 'a whole number')
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(repr(one) for one in arguments)
    if origin is UnionType:
        return " or ".join(_words(one) for one in arguments if one is not NoneType)
    if origin is tuple:
        return "a list of texts"
    if origin is Mapping:
        return "a table of texts"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}[
        kind
    ]


def _at_least(settings: Settings, name: str, minimum: int) -> None:
    value = getattr(settings, name)
    if value < minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {value}")
