"""The progress of a named training, stored on its server: the runs and checkpoints with its name.

The position in the data is in the checkpoint's ``user_metadata``. One operation saves weights and position, so they
are always consistent, and any process on any machine can find both by name.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.errors import APIStatusError
from tinkex.recovery.diagnosis import says_gone
from tinkex.types import Checkpoint

if TYPE_CHECKING:
    from tinkex.clients.rest import RestClient

__all__ = ["SavedCheckpoint", "TrainingProgress"]

NAME = "tinkex_training"
START = "tinkex_start"
STEP = "tinkex_step"
_START = re.compile(r"\d{8,}-[0-9a-f]+")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of the training, and the number of batches applied to its weights."""

    position: int
    checkpoint: Checkpoint

    @property
    def path(self) -> str:
        """The path to load it from."""
        return self.checkpoint.tinker_path


class TrainingProgress:
    """The runs and checkpoints of one training; a training that starts over has a new ``start``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = ""
        self._runs: list[str] = []

    def begin(self) -> None:
        """Starts over with a new ``start`` and no runs."""
        number = int(self.start.partition("-")[0]) + 1 if self.start else 1
        self.start = f"{number:08d}-{secrets.token_hex(4)}"
        self._runs = []

    def add_run(self, run_id: str) -> None:
        """Adds a run to the training."""
        self._runs.append(run_id)

    def run_metadata(self, own: Mapping[str, str]) -> dict[str, str]:
        """Returns the metadata that marks a run as part of this training."""
        return {**own, NAME: self.name, START: self.start}

    def checkpoint_metadata(self, position: int, numbers: Mapping[str, float]) -> dict[str, str]:
        """Returns the metadata of a checkpoint, with the metrics of its last step."""
        own = {name: repr(float(number)) for name, number in numbers.items()}
        return {**own, NAME: self.name, START: self.start, STEP: str(position)}

    async def find(self, rest: RestClient) -> bool:
        """Finds earlier runs of this name and continues the latest start; returns whether there is one."""
        starts: dict[str, list[str]] = {}
        async for run in rest.iter_training_runs_async():
            metadata = run.user_metadata or {}
            start = str(metadata.get(START, ""))
            if metadata.get(NAME) == self.name and _START.fullmatch(start):
                starts.setdefault(start, []).append(run.training_run_id)
        if not starts:
            return False
        self.start = max(starts)  # they start with their number, so the latest is the maximum
        self._runs = starts[self.start]
        return True

    async def saved(self, rest: RestClient) -> list[SavedCheckpoint]:
        """Returns the checkpoints of the training, by decreasing position."""
        found: list[SavedCheckpoint] = []
        for run_id in self._runs:
            found += self._of_run(await self._listed(rest, run_id))
        return sorted(found, key=lambda one: (one.position, one.checkpoint.time), reverse=True)

    async def _listed(self, rest: RestClient, run_id: str) -> Sequence[Checkpoint]:
        try:
            return (await rest.list_checkpoints_async(run_id)).checkpoints
        except APIStatusError as error:
            if says_gone(error):
                return []  # the server has deleted the run, and its checkpoints with it
            raise

    def _of_run(self, checkpoints: Sequence[Checkpoint]) -> list[SavedCheckpoint]:
        saved = []
        for one in checkpoints:
            metadata = one.user_metadata or {}
            step = str(metadata.get(STEP, ""))
            if one.checkpoint_type == "training" and metadata.get(START) == self.start and step.isdigit():
                saved.append(SavedCheckpoint(int(step), one))
        return saved
