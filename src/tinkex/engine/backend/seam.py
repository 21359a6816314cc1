"""What the engine can ask of whoever holds the models, and what it gets to know of them.

Runs, their weights and the adapters of samplers stay on the far side; on this side they have names. Everything that
crosses is small, or what a client sent and gets back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tinkex.errors import TinkexError

if TYPE_CHECKING:
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.sampler.limits import SamplerLimits
    from tinkex.engine.trainer.examples import Limits
    from tinkex.types import (
        AdamParams,
        CreateCustomLossRequest,
        Datum,
        LoraConfig,
        SampleRequest,
        SampleResponse,
        StopReason,
    )


class WorkerDied(Exception):
    """The worker is gone, and with it everything that was in its memory; the call had no result and left no trace.

    ``own_fault`` says that it went by itself, because of what it computed, as far as that can be told.
    """

    def __init__(self, reason: str, *, own_fault: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.own_fault = own_fault


class Damaged(TinkexError):
    """What a run would be restored from is not what was written."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a base model once it has been loaded: enough to check what is asked of it, without its weights."""

    directory: Path
    arch: Architecture
    passes: Limits
    samples: SamplerLimits
    computes_with: str
    """What computes its samples, for people."""


@dataclass(frozen=True)
class UploadedLoss:
    """A loss that a user uploaded: its name, and the request that defined it, as it is on record."""

    loss_id: str
    definition: bytes


@dataclass(frozen=True, eq=False)
class PassJob:
    """One forward pass of a run over some datums, with or without gradients."""

    run_id: str
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] | None
    backward: bool
    custom_loss: UploadedLoss | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A saved directory to go on from; without ``optimizer`` Adam starts anew."""

    directory: Path
    optimizer: bool


@dataclass(frozen=True)
class SavedFile:
    """A savepoint's file, as it was when it was written."""

    path: Path
    name: str
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class Join:
    """A sample that joins the batch; ``directory`` holds its adapter, None is the base model."""

    request_id: str
    request: SampleRequest
    sequence_ids: Sequence[str]
    owner: str
    directory: str | None
    watched: bool
    """Whether its tokens are reported as they are drawn."""


@dataclass(frozen=True, eq=False)
class SampleStep:
    """What is asked of the samples of one base model: who joins, who leaves, who is watched from now on, and one step."""

    join: Sequence[Join] = ()
    leave: Sequence[str] = ()
    watch: Sequence[str] = ()


@dataclass(frozen=True)
class Growth:
    """The tokens that one sequence of a watched sample got, the first of them at position ``start``."""

    request_id: str
    index: int
    start: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: StopReason | None


@dataclass(frozen=True)
class Batch:
    """What the samples of one base model hold."""

    num_sequences: int = 0
    kv_bytes: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, eq=False)
class SampleReport:
    """What a step brought: the samples that ended or were refused, tokens of those that are watched, and what the rest hold."""

    ended: Sequence[tuple[str, SampleResponse | TinkexError]]
    grown: Sequence[Growth]
    batch: Batch


PassResult: TypeAlias = bytes | TinkexError
"""The output of a pass, encoded as it is kept and sent, or why it has none."""


@dataclass(frozen=True)
class WorkerStatus:
    """The process that computes, for whoever watches it."""

    pid: int | None
    state: str
    """``starting``, ``running``, ``silent`` (it shows no sign of life) or ``restarting``."""
    restarts: int

    @property
    def hindrance(self) -> str | None:
        """Why nothing is computed at the moment, or None."""
        if self.state == "silent":
            return "the process that computes shows no sign of life"
        return None if self.state == "running" else "the process that computes is being started"


class Backend(Protocol):
    """Holds base models, runs and samples, and computes with them.

    Everything belongs to the engine thread, except ``write_savepoint`` (one other thread) and ``check_loss`` (any thread).
    A call raises what went wrong, typed as it was where it happened, or :class:`WorkerDied`.
    """

    @property
    def status(self) -> WorkerStatus | None:
        """The process that computes; None if it is this one."""
        ...

    def start(self) -> None:
        """Get ready to compute, also again after the worker died; returns at once."""
        ...

    def check(self) -> None:
        """Raise :class:`WorkerDied` if the worker is gone."""
        ...

    def close(self) -> None:
        """End the worker, and wait until it is gone."""
        ...

    def load(self, source: str) -> ModelFacts:
        """Bring a base model into memory, if it is not there."""
        ...

    def check_loss(self, request: CreateCustomLossRequest) -> None:
        """Refuse an uploaded loss that cannot be run."""
        ...

    # ---- runs

    def create(
        self, run_id: str, source: str, lora: LoraConfig, checkpoint: Checkpoint | None = None
    ) -> None:
        """Put a run into memory, fresh or as a checkpoint has it; the base model must be loaded."""
        ...

    def forget(self, run_id: str) -> None:
        """Drop a run from memory, if it is there; never fails."""
        ...

    def run_pass(self, jobs: Sequence[PassJob]) -> Sequence[PassResult]:
        """Run passes of runs of one base model together; each fails or succeeds alone."""
        ...

    def optim_step(self, run_id: str, params: AdamParams) -> dict[str, float]:
        """One optimizer step of a run; returns its metrics."""
        ...

    def load_weights(self, run_id: str, checkpoint: Checkpoint) -> None:
        """Put a checkpoint in the place of what a run has."""
        ...

    def save_weights(self, run_id: str, directory: Path, base_model: str, *, optimizer: bool) -> None:
        """Write a checkpoint of a run into a directory."""
        ...

    def export_weights(
        self, run_id: str, directory: Path, base_model: str, recipients: Sequence[str] | None
    ) -> None:
        """Write the weights of a run for use elsewhere into a directory."""
        ...

    # ---- savepoints

    def capture(self, run_id: str) -> int:
        """Take the exact state of a run, which later turns do not change; the number stands for it."""
        ...

    def write_savepoint(self, capture: int, file: Path) -> bytes:
        """Write what was captured into a file, and let go of it; returns the file's digest."""
        ...

    def restore(self, run_id: str, source: str, saved: SavedFile) -> None:
        """Put a run into memory as a savepoint has it, bit for bit; :class:`Damaged` if the file is not what was written."""
        ...

    # ---- samples

    def keep_adapter(self, run_id: str, directory: str) -> None:
        """Remember that a directory holds the adapter that a run has at the moment, so that it need not be read; never fails."""
        ...

    def drop_adapter(self, directory: str) -> None:
        """Forget an adapter whose directory is being deleted; never fails."""
        ...

    def sample(self, source: str, step: SampleStep) -> SampleReport:
        """One step of the samples of a base model."""
        ...
