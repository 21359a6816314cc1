"""The interface of a backend, which holds base models, runs and samples, and the values that cross it.

Weights stay on the backend's side; the engine refers to them by name. Everything that crosses is small, or what a client
sent and gets back.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tinkex.errors import TinkexError

if TYPE_CHECKING:
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.sampler.limits import SamplerLimits
    from tinkex.engine.trainer.examples import Example, Limits
    from tinkex.types import (
        AdamParams,
        CreateCustomLossRequest,
        LoraConfig,
        SampleRequest,
        SampleResponse,
        StopReason,
    )


class WorkerLost(Exception):
    """The worker exited, and everything in its memory is gone; the call had no result and no effect.

    ``own_fault`` is true if it crashed because of what it computed, as far as that can be determined.
    """

    def __init__(self, reason: str, *, own_fault: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.own_fault = own_fault
        self.replaying: AbstractSet[str] = frozenset()
        """The runs that were being restored or replayed when it happened."""


class CorruptState(TinkexError):
    """What a run would be restored from is not what was written."""


@dataclass(frozen=True)
class ModelInfo:
    """A base model that has been loaded once: enough to validate requests, without its weights."""

    directory: Path
    arch: Architecture
    passes: Limits
    samples: SamplerLimits
    computes_with: str
    """What computes its samples, in words."""


@dataclass(frozen=True)
class UploadedLoss:
    """A loss that a user uploaded: its id, and the request that defined it, as recorded."""

    loss_id: str
    definition: bytes


@dataclass(frozen=True, eq=False)
class PassJob:
    """One forward pass of a run over some datums, with or without gradients."""

    run_id: str
    loss_fn: str
    examples: Sequence[Example]
    """The datums, validated and as flat arrays."""
    backward: bool
    custom_loss: UploadedLoss | None = None


@dataclass(frozen=True)
class SavedWeights:
    """A checkpoint's directory to load; without ``optimizer``, Adam starts from zero."""

    directory: Path
    optimizer: bool


@dataclass(frozen=True)
class SavepointFile:
    """A savepoint's file, with the size and digest it was written with."""

    path: Path
    name: str
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class AddRequest:
    """A sample that joins the batch; ``directory`` holds its adapter, None is the base model."""

    request_id: str
    request: SampleRequest
    sequence_ids: Sequence[str]
    owner: str
    directory: str | None
    stream: bool
    """Whether its tokens are reported as they are drawn."""


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """One decode step of a base model: requests to add, to cancel, and to stream from now on."""

    add: Sequence[AddRequest] = ()
    cancel: Sequence[str] = ()
    stream: Sequence[str] = ()


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of one sequence of a streamed sample, the first of them at position ``start``."""

    request_id: str
    index: int
    start: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: StopReason | None


@dataclass(frozen=True)
class BatchStats:
    """The decode batch of one base model."""

    num_sequences: int = 0
    kv_bytes: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, eq=False)
class DecodeReport:
    """The result of a step: samples that ended or were rejected, new tokens of streamed ones, and the batch after it."""

    ended: Sequence[tuple[str, SampleResponse | TinkexError]]
    deltas: Sequence[TokenDelta]
    batch: BatchStats


PassResult: TypeAlias = bytes | TinkexError
"""The output of a pass, encoded as it is stored and sent, or its error."""


@dataclass(frozen=True)
class WorkerStatus:
    """The worker process."""

    pid: int | None
    state: str
    """``starting``, ``running``, ``silent`` (its heartbeat is missing) or ``restarting``."""
    restarts: int

    @property
    def unavailable(self) -> str | None:
        """Why nothing is computed at the moment, or None."""
        if self.state == "silent":
            return "the worker process does not respond"
        return None if self.state == "running" else "the worker process is being started"


class Backend(Protocol):
    """Holds base models, runs and samples, and computes with them.

    Only called on the lane's thread, except ``write_savepoint`` (one other thread) and ``check_loss``, ``check`` and ``status``
    (any thread). A call raises what failed, typed as it was where it happened, or :class:`WorkerLost`.
    """

    @property
    def status(self) -> WorkerStatus | None:
        """The worker process; None if this process computes."""
        ...

    def start(self) -> None:
        """Start, also again after the worker was lost; returns before models are loaded."""

    def check(self) -> None:
        """Raise :class:`WorkerLost` if the worker has exited."""

    def close(self) -> None:
        """Stop the worker, and wait until it has exited."""

    def load(self, source: str) -> ModelInfo:
        """Load a base model, if it is not loaded."""
        ...

    def check_loss(self, request: CreateCustomLossRequest) -> None:
        """Raise ``InvalidInput`` for an uploaded loss that cannot be run."""

    # ---- runs

    def create(
        self, run_id: str, source: str, lora: LoraConfig, checkpoint: SavedWeights | None = None
    ) -> None:
        """Create a run in memory, fresh or from a checkpoint; the base model must be loaded."""

    def forget(self, run_id: str) -> None:
        """Drop a run from memory, if it is there; never fails."""

    def run_pass(self, jobs: Sequence[PassJob]) -> Sequence[PassResult]:
        """Run passes of runs of one base model together; each fails or succeeds alone."""
        ...

    def optim_step(self, run_id: str, params: AdamParams) -> dict[str, float]:
        """Run one optimizer step of a run; returns its metrics."""
        ...

    def load_weights(self, run_id: str, checkpoint: SavedWeights) -> None:
        """Replace the state of a run by a checkpoint."""

    def save_weights(self, run_id: str, directory: Path, base_model: str, *, optimizer: bool) -> None:
        """Write a checkpoint of a run into a directory."""

    def export_weights(
        self, run_id: str, directory: Path, base_model: str, recipients: Sequence[str] | None
    ) -> None:
        """Write the weights of a run for use elsewhere into a directory."""

    # ---- savepoints

    def capture(self, run_id: str) -> int:
        """Copy the exact state of a run, which later turns do not change; returns a number for it."""
        ...

    def write_savepoint(self, capture: int, file: Path) -> bytes:
        """Write a captured state into a file, and release it; returns the file's digest."""
        ...

    def restore(self, run_id: str, source: str, saved: SavepointFile) -> None:
        """Restore a run from a savepoint, bit for bit; :class:`CorruptState` if the file is not what was written."""

    # ---- samples

    def keep_adapter(self, run_id: str, directory: str) -> None:
        """Cache the current adapter of a run as the contents of a directory, so that it need not be read; never fails."""

    def drop_adapter(self, directory: str) -> None:
        """Drop a cached adapter whose directory is being deleted; never fails."""

    def sample(self, source: str, step: DecodeStep) -> DecodeReport:
        """Run one decode step of a base model."""
        ...
