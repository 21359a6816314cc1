"""The data of a run, read and checked before any request: examples, held-out examples, and the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tinkex.errors import ConfigError
from tinkex.train.examples import (
    Example,
    describe,
    last_text,
    read_conversations,
    read_preferences,
    read_prompts,
    split,
)
from tinkex.train.rewards import RewardSum
from tinkex.train.settings import DpoSettings, GrpoSettings, Settings, SftSettings

__all__ = ["TrainingData", "read_data"]

E = TypeVar("E", bound=Example)


@dataclass(frozen=True)
class TrainingData(Generic[E]):
    """The examples of a run."""

    source: Path
    examples: Sequence[E]
    held_out: Sequence[E]
    """Examples for evaluation only."""
    reward: RewardSum | None = None

    @property
    def description(self) -> str:
        """The number of examples, their source and their columns, on one line."""
        num_all = len(self.examples)
        held_out = f", {len(self.held_out)} held out for evaluation" if self.held_out else ""
        plural = "" if num_all == 1 else "s"
        return f"{num_all} example{plural} from {self.source} ({describe(self.examples)}){held_out}"


def read_data(settings: Settings) -> TrainingData[Any]:
    """Reads the data and the reward that ``settings`` name; raises ``ConfigError`` that names the row, column or file at fault.

    It needs no model and no server, so call it before anything that takes time.

    >>> import tempfile
    >>> from tinkex.train import SftSettings
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data = Path(folder, "pairs.jsonl")
    ...     _ = data.write_text('{"prompt": "2 + 2 =", "completion": " 4"}')
    ...     len(read_data(SftSettings(data=data, output=Path(folder, "run"), eval_fraction=0)).examples)
    1
    """
    examples, held_out = _examples(settings, settings.data), []
    if settings.eval_data is not None:
        held_out = _examples(settings, settings.eval_data)
    else:
        examples, held_out = split(examples, settings.eval_fraction, settings.seed)
    for option, value in (
        ("--keep-best", settings.keep_best),
        ("--early-stop", settings.early_stop),
        ("--eval-every", settings.eval_every),
    ):
        if value and not held_out:
            raise ConfigError(
                f"{option} needs examples for evaluation, and there are none; raise --eval-fraction, or give --eval-data"
            )
    reward = None
    if isinstance(settings, GrpoSettings):
        reward = RewardSum.load(tuple(settings.reward), tuple(settings.reward_regex))
        for one in (*examples[:1], *held_out[:1]):
            reward.score(last_text(one.prompt), "", one.fields)  # finds its mistakes before a run exists
    return TrainingData(settings.data, examples, held_out, reward)


def _examples(settings: Settings, source: Path) -> list[Any]:
    if isinstance(settings, SftSettings):
        return list(read_conversations(source, settings.columns))
    if isinstance(settings, DpoSettings):
        return list(read_preferences(source, settings.columns))
    if isinstance(settings, GrpoSettings):
        return list(read_prompts(source, settings.columns))
    raise ConfigError(
        f"{type(settings).__name__} has no recipe; use SftSettings, DpoSettings or GrpoSettings"
    )
