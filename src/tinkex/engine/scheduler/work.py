"""One accepted training operation, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Request = TypeVar("Request")


class Kind(StrEnum):
    """What an operation does to its run; the values are the names results are stored under."""

    CREATE = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE = "save_weights"
    SAVE_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_EXTERNAL = "save_weights_external"
    LOAD = "load_weights"
    UNLOAD = "unload_model"
    SAMPLE = "sample"

    @property
    def packs(self) -> bool:
        """Whether it can share a pass with others; everything else is a barrier for its own run."""
        return self in {Kind.FORWARD, Kind.FORWARD_BACKWARD}

    @property
    def trains(self) -> bool:
        """Whether it computes something that a replay would have to compute again."""
        return self in {Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP}


@dataclass(frozen=True)
class Work(Generic[Request]):
    """An operation of one run.

    ``tenant`` pays for it, ``group`` is the base model it runs on (only work of one group shares a pass), and
    ``num_tokens`` is what it costs.
    """

    request_id: str
    tenant: str
    group: str
    run_id: str
    seq_id: int
    kind: Kind
    num_tokens: int
    request: Request
