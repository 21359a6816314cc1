"""One accepted request: what it asks for, how far it has come, and the transitions it may make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from tinkex.engine.store import CheckpointKind, FutureStatus, LoopEvent, Outcome, UsageKind
from tinkex.types import (
    CreateModelRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UnloadModelRequest,
)

if TYPE_CHECKING:
    from tinkex.engine.lanes.interface import PassJob

SaveRequest: TypeAlias = SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest
RunRequest: TypeAlias = (
    ForwardBackwardRequest | OptimStepRequest | SaveRequest | LoadWeightsRequest | UnloadModelRequest
)
"""The requests of a run that exists."""
OperationRequest: TypeAlias = CreateModelRequest | RunRequest | SampleRequest
"""The requests that are accepted now and finish later."""
CHECKPOINT_KINDS: Mapping[type[SaveRequest], CheckpointKind] = {
    SaveWeightsRequest: CheckpointKind.WEIGHTS,
    SaveWeightsForSamplerRequest: CheckpointKind.SAMPLER_WEIGHTS,
    SaveWeightsExternalRequest: CheckpointKind.EXTERNAL_WEIGHTS,
}


class Kind(StrEnum):
    """What an operation does; the values are the names results are stored under."""

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
        """Whether a replay would have to compute it again."""
        return self in {Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP}

    @staticmethod
    def of(request: OperationRequest) -> Kind:
        """The kind of a request.

        >>> Kind.of(UnloadModelRequest(model_id="m"))
        <Kind.UNLOAD: 'unload_model'>
        """
        if isinstance(request, ForwardBackwardRequest):
            return Kind.FORWARD if request.forward_only else Kind.FORWARD_BACKWARD
        return _KINDS[type(request)]


REQUEST_TYPES: Mapping[Kind, type[OperationRequest]] = {
    Kind.CREATE: CreateModelRequest,
    Kind.FORWARD: ForwardBackwardRequest,
    Kind.FORWARD_BACKWARD: ForwardBackwardRequest,
    Kind.OPTIM_STEP: OptimStepRequest,
    Kind.SAVE: SaveWeightsRequest,
    Kind.SAVE_FOR_SAMPLER: SaveWeightsForSamplerRequest,
    Kind.SAVE_EXTERNAL: SaveWeightsExternalRequest,
    Kind.LOAD: LoadWeightsRequest,
    Kind.UNLOAD: UnloadModelRequest,
    Kind.SAMPLE: SampleRequest,
}
_KINDS = {request_type: kind for kind, request_type in REQUEST_TYPES.items()}


class State(StrEnum):
    """How far an operation has come."""

    RECORDED = "recorded"
    """On disk; an earlier number of its run is missing."""
    QUEUED = "queued"
    """Ready to run."""
    RUNNING = "running"
    """Dispatched to a lane."""
    COMPUTED = "computed"
    """Has an outcome that is not committed yet."""
    ENDED = "ended"
    """Its outcome is committed, and its waiters are notified."""


TRANSITIONS: Mapping[State, Mapping[State, str]] = {
    State.RECORDED: {
        State.QUEUED: "every earlier number of its run is here",
        State.COMPUTED: "the gap timed out, or its run was closed",
    },
    State.QUEUED: {
        State.RUNNING: "dispatched to a lane",
        State.COMPUTED: "cancelled, quarantined, or its run was closed",
    },
    State.RUNNING: {
        State.COMPUTED: "the lane reported a result or an error, or it was cancelled",
        State.QUEUED: "the lane was lost",
    },
    State.COMPUTED: {State.ENDED: "committed"},
    State.ENDED: {},
}
"""Every transition there is, and what causes it."""


@dataclass(eq=False, slots=True)
class Operation:
    """An accepted request, from its acceptance to its outcome.

    ``owner`` is the user it counts against, ``model`` the source of its base model (only operations of one model share a
    pass), ``run_id`` the run or sampling session whose numbering it follows, and ``num_tokens`` the tokens sent with it. Its request
    is on disk; while it waits, it is in memory too only if there is room.

    >>> operation = Operation("req-1", "ada", "tiny", "run", 1, Kind.OPTIM_STEP, 0)
    >>> operation.move(State.QUEUED)
    >>> operation.move(State.ENDED)
    Traceback (most recent call last):
    AssertionError: an operation cannot go from queued to ended
    """

    request_id: str
    owner: str
    model: str
    run_id: str
    seq_id: int
    kind: Kind
    num_tokens: int
    request: OperationRequest | None = field(default=None, repr=False)
    """What it asks for; None if it is read from disk when it runs, or its datums have been read into ``job``."""
    job: PassJob | None = field(default=None, repr=False)
    """A pass as a lane runs it; None until its datums have been read."""
    loss: str | None = None
    """The digest of the custom loss of a pass; None if it has none."""
    tokens_computed: int = field(init=False)
    """The tokens that are computed for it: those that its datums share count once, and, when it has run, not those that an
    earlier operation of its turn has computed."""
    prefix_sharing: bool = False
    """Whether it ran in a turn whose datums share prefixes, so that a replay repeats it."""
    num_shards: int = 1
    """In how many shards its pass was computed, so that a replay cuts it in the same way."""
    shard_threads: int = 0
    """The compute threads of its shards, where a pass was cut; 0: those of the lane."""
    num_datums: int = 0
    """How many datums a pass has; once it has run, those that its custom loss was computed for."""
    charged: int = 0
    """What its user was charged when it started, in tokens."""
    loss_tokens: int = 0
    """What its custom loss has cost, in tokens; set by the lane that ran it."""
    num_bytes: int = 0
    """The size of its request, encoded."""
    held_bytes: int = 0
    """The memory that ``request`` and ``job`` take while it waits."""
    state: State = State.RECORDED
    lane: str = ""
    """The lane it was last dispatched to."""
    attempt: int = 1
    """How many times it has been dispatched, or will have been with the next one."""
    directory: str | None = None
    """The adapter that a sample was first dispatched with, and is again after a lost lane: inflight weights may have been
    replaced since, and the tokens that a reader has of it must not change."""
    started_at: float | None = None
    """When it was first dispatched, in seconds since the epoch."""
    cancelled: bool = False
    """Whether a running sample is to leave its batch."""
    outcome: Outcome | None = None
    """How it ended; set by the lane that ran it, or by the loop if it never ran."""
    ran: bool = False
    """Whether it reached the weights of its run, so that a replay repeats it."""
    usage: Mapping[UsageKind, int] = field(default_factory=dict)
    """What it used, for metering."""
    loop_event: LoopEvent | None = None
    """What it did, for the metrics of its run's training loop; set by the lane that ran it."""
    trace: Any = None
    """The open spans of a traced operation."""

    def __post_init__(self) -> None:
        self.tokens_computed = self.num_tokens  # all of them, until more is known

    @property
    def succeeded(self) -> bool:
        """Whether it has an outcome that is not an error."""
        return self.outcome is not None and self.outcome.status is FutureStatus.DONE

    def move(self, state: State) -> None:
        """Make a transition; only the owner of the operation's state calls this."""
        assert state in TRANSITIONS[self.state], f"an operation cannot go from {self.state} to {state}"
        self.state = state
