"""The values that cross the interface of a backend, which holds base models, runs and samples.

Weights stay on the backend's side; the engine refers to them by name. Everything that crosses is small, or what a client
sent and gets back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tinkex.errors import TinkexError

if TYPE_CHECKING:
    from tinkex.engine.lanes.in_process import LocalBackend
    from tinkex.engine.lanes.ray_backend import RayBackend
    from tinkex.engine.lanes.worker_process import ProcessBackend
    from tinkex.engine.model.architecture import Architecture
    from tinkex.engine.sampler.limits import SamplerLimits
    from tinkex.engine.trainer.examples import Example, Limits
    from tinkex.types import SampleRequest, SampleResponse, StopReason, TopkLogprobs


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
        self.evicting = False
        """Whether runs were being evicted, so that no operation is to blame."""

    def __reduce__(self) -> tuple[object, ...]:
        return partial(WorkerLost, own_fault=self.own_fault), (self.reason,)


class NoFreeNode(WorkerLost):
    """A lane that is only there while it is needed cannot be: nothing has room for it at the moment."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, own_fault=False)


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

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        definition = self.custom_loss.definition if self.custom_loss is not None else b""
        return len(definition) + sum(example.num_bytes for example in self.examples)


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
    topk: TopkLogprobs | None = None
    """The top-k tokens at these positions, if the sample has them."""


@dataclass(frozen=True)
class BatchStats:
    """The decode batch of one base model."""

    num_sequences: int = 0
    kv_bytes: int = 0
    num_preemptions: int = 0

    @classmethod
    def total(cls, batches: Iterable[BatchStats | None]) -> BatchStats:
        """The batches of one base model on several lanes together; None for a lane without one."""
        known = [each for each in batches if each is not None]
        return cls(
            sum(each.num_sequences for each in known),
            sum(each.kv_bytes for each in known),
            sum(each.num_preemptions for each in known),
        )


@dataclass(frozen=True, eq=False)
class DecodeReport:
    """The result of a step: samples that ended or were rejected, new tokens of streamed ones, and the batch after it."""

    ended: Sequence[tuple[str, SampleResponse | TinkexError]]
    deltas: Sequence[TokenDelta]
    batch: BatchStats


@dataclass(frozen=True, eq=False)
class PassReport:
    """How a pass ended."""

    output: bytes | TinkexError
    """Its output, encoded as it is stored and sent, or its error."""
    loss_tokens: int
    """What its custom loss has cost, in tokens."""
    loss_datums: int
    """The datums that its custom loss was computed for: not all, if it failed."""
    tokens_computed: int
    """The tokens that were computed for it; those shared with an earlier one of the same call count there."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of its output."""
    num_datums: int = 0
    """The datums that they are of."""


@dataclass(frozen=True, eq=False)
class ShardTask:
    """Some datums of a pass of a run that another trainer holds."""

    source: str
    """The base model."""
    adapter: str
    """The key of the copy of its adapter."""
    loss_fn: str
    examples: Sequence[Example]
    backward: bool
    share_prefixes: bool
    threads: int
    """Compute threads; 0: those of the lane."""


StepResult: TypeAlias = "Mapping[str, float] | Exception"
"""The metrics of an optimizer step, or its error."""


@dataclass(frozen=True)
class WorkerStatus:
    """The worker process."""

    pid: int | None
    state: str
    """``starting``, ``running``, ``silent`` (its heartbeat is missing) or ``restarting``."""
    restarts: int
    node: str | None = None
    """The address of the machine it runs on, or None for this one."""

    @property
    def unavailable(self) -> str | None:
        """Why nothing is computed at the moment, or None."""
        if self.state == "silent":
            return "the worker process does not respond"
        return None if self.state == "running" else "the worker process is being started"


Backend: TypeAlias = "LocalBackend | ProcessBackend | RayBackend"
"""Holds base models, runs and samples, and computes with them. The methods of ``LocalBackend`` are the interface; a worker process
and an actor of Ray have the same ones."""
