"""One accepted request: what it asks for, how far it has come, and the transitions it may make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

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
    from tinkex.engine.store import Outcome, UsageKind

OperationRequest: TypeAlias = (
    CreateModelRequest
    | ForwardBackwardRequest
    | OptimStepRequest
    | SaveWeightsRequest
    | SaveWeightsForSamplerRequest
    | SaveWeightsExternalRequest
    | LoadWeightsRequest
    | UnloadModelRequest
    | SampleRequest
)
"""The requests that are accepted now and finish later."""


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
    pass), ``run_id`` the run or sampling session whose numbering it follows, and ``num_tokens`` what it costs.

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
    """What it asks for; None for a pass whose datums have been read into ``job``."""
    job: PassJob | None = field(default=None, repr=False)
    """A pass as a lane runs it; None until its datums have been read."""
    state: State = State.RECORDED
    attempt: int = 1
    """How many times it has been dispatched, or will have been with the next one."""
    started_at: float | None = None
    """When it was first dispatched, in seconds since the epoch."""
    cancelled: bool = False
    """Whether a running sample is asked to leave its batch."""
    outcome: Outcome | None = None
    ran: bool = False
    """Whether it reached the weights of its run, so that a replay repeats it."""
    usage: Mapping[UsageKind, int] = field(default_factory=dict)
    """What it used, for metering."""
    trace: Any = None
    """The open spans of a traced operation."""

    def move(self, state: State) -> None:
        """Make a transition; only the owner of the operation's state calls this."""
        assert state in TRANSITIONS[self.state], f"an operation cannot go from {self.state} to {state}"
        self.state = state
