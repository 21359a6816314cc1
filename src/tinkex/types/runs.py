"""Training runs, as listed by a server."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tinkex.types.base import Value
from tinkex.types.checkpoints import Checkpoint, Cursor

__all__ = ["TrainingRun", "TrainingRunsResponse"]


class TrainingRun(Value, frozen=True, kw_only=True):
    """One run: a base model, an adapter, its last checkpoints."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, Any] | None = None


class TrainingRunsResponse(Value, frozen=True, kw_only=True):
    """A page of runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor
