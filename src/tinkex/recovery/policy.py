"""The recovery policy: the checkpoint to restart from, the number of attempts, and callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from tinkex._transport.retry import RetryPolicy
from tinkex.errors import ConfigError, RecoveryError
from tinkex.types import Checkpoint, ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinkex.clients.training import TrainingClient

__all__ = ["Best", "CheckpointSelector", "Condition", "RecoveryPolicy", "RecoveryResult", "rank_checkpoints"]

Condition = Literal["corrupted", "lost", "unreachable"]
"""Why a run cannot continue: its weights are corrupt, the server has lost it, or the server does not respond."""

CheckpointSelector: TypeAlias = Callable[[str, Sequence[Checkpoint]], Any]
"""Takes a run id and its training checkpoints, newest first; returns one of them or a path. May be async."""


@dataclass(frozen=True)
class Best:
    """The checkpoint with the lowest (or ``highest``) value of a metric in its ``user_metadata``.

    Save it there: ``training.save_state("0010", user_metadata={"loss": "1.25"})``.

    >>> Best("reward", highest=True).metric
    'reward'
    """

    metric: str
    highest: bool = False

    def value(self, metadata: Mapping[str, Any] | None) -> float | None:
        """Returns the metric of a checkpoint; None unless it is a finite number."""
        try:
            number = float((metadata or {}).get(self.metric, math.nan))
        except (TypeError, ValueError):
            return None
        return number if math.isfinite(number) else None


@dataclass(frozen=True)
class RecoveryResult:
    """A run that was restored as a new run."""

    run_id: str
    training: TrainingClient
    """The new run, in the state of the checkpoint: repeat the operations after it."""
    checkpoint: str
    attempts: int
    condition: Condition


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """How to restart a run that cannot continue.

    ``checkpoint`` is ``"latest"``, ``Best("loss")``, a ``tinker://`` path, or a function of the run id and its
    checkpoints. If the latest or best one cannot be loaded, the next one is tried. After a transient failure, the next
    attempt waits ``backoff_s``, then twice as long, up to ``max_backoff_s``; a permanent one (an invalid key, no
    checkpoint) ends the recovery immediately. A server is ``unreachable`` after ``unreachable_after_s`` seconds
    without a response. Callbacks run on their own thread; their exceptions are emitted as events.

    >>> RecoveryPolicy(max_attempts=5).retries.max_retries
    4
    """

    checkpoint: str | Best | CheckpointSelector = "latest"
    restore_optimizer: bool = True
    max_attempts: int = 3
    backoff_s: float = 5.0
    max_backoff_s: float = 60.0
    poll_interval_s: float = 30.0
    unreachable_after_s: float = 300.0
    on_recovery: Callable[[RecoveryResult], Any] | None = None
    on_failure: Callable[[str, Exception], Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.checkpoint, str):
            if self.checkpoint != "latest":
                _check_path(self.checkpoint)
        elif not isinstance(self.checkpoint, Best) and not callable(self.checkpoint):
            raise ConfigError(
                f"checkpoint must be 'latest', Best(metric), a tinker:// path or a function, got {self.checkpoint!r}"
            )
        if (
            isinstance(self.max_attempts, bool)
            or not isinstance(self.max_attempts, int)
            or self.max_attempts < 1
        ):
            raise ConfigError(f"max_attempts must be an integer ≥ 1, got {self.max_attempts!r}")
        for name in ("backoff_s", "max_backoff_s", "poll_interval_s", "unreachable_after_s"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise ConfigError(f"{name} must be a positive number of seconds, got {seconds!r}")
        for name in ("on_recovery", "on_failure"):
            callback = getattr(self, name)
            if callback is not None and not callable(callback):
                raise ConfigError(f"{name} must be a function, got {callback!r}")

    @property
    def retries(self) -> RetryPolicy:
        """The retry policy with these attempts and this back-off."""
        return RetryPolicy(
            max_retries=self.max_attempts - 1,
            total_s=math.inf,
            base_s=self.backoff_s,
            cap_s=self.max_backoff_s,
        )


TRAINING: Final = "training"


def rank_checkpoints(choice: str | Best, run_id: str, checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Returns the paths to restart from, best first; raises ``RecoveryError`` if there are none.

    >>> rank_checkpoints("tinker://run-1/weights/0010", "run-1", [])
    ['tinker://run-1/weights/0010']
    """
    if isinstance(choice, str) and choice != "latest":
        return [choice]
    usable = newest_first(checkpoints)
    if not usable:
        raise RecoveryError(
            f"run {run_id} has no checkpoint to restart from; save checkpoints with save_state", run_id
        )
    if isinstance(choice, Best):
        scored = [(choice.value(one.user_metadata), one) for one in usable]
        kept = [(value, one) for value, one in scored if value is not None]
        if not kept:
            raise RecoveryError(
                f"no checkpoint of run {run_id} has the metric {choice.metric!r} in its user_metadata; save it with "
                f"save_state(name, user_metadata={{{choice.metric!r}: …}}), or use checkpoint='latest'",
                run_id,
            )
        usable = [one for _, one in sorted(kept, key=lambda pair: pair[0], reverse=choice.highest)]
    return [one.tinker_path for one in usable]


def newest_first(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Returns the checkpoints with an optimizer state, newest first."""
    training = [one for one in checkpoints if one.checkpoint_type == TRAINING]
    return sorted(training, key=lambda one: one.time, reverse=True)


def _check_path(path: str) -> None:
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise ConfigError(
            f"checkpoint must be 'latest', Best(metric), a function or a path; {error}"
        ) from error
    if parsed.checkpoint_type != TRAINING:
        raise ConfigError(
            f"checkpoint {path} is for sampling; a run restarts from tinker://<run>/weights/<name>"
        )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Loads a name of 0.1, with a ``DeprecationWarning``."""
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(name)
        from tinkex._moved import load_renamed

        return load_renamed(__name__, name)
