"""What a run's condition is, and what a failed call means for it: pure functions of replies and errors."""

from __future__ import annotations

from typing import TypeAlias

from tinkex._transport.retry import ErrorStatus, GiveUp, NoReply, Outcome, is_transient
from tinkex._wire.endpoints import endpoint
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    RequestErrorCategory,
    RequestFailedError,
    ResultExpiredError,
)
from tinkex.recovery.policy import Condition
from tinkex.types import TrainingRun

__all__ = ["condition_of", "is_interruption", "outcome_of", "says_gone", "says_run_is_gone"]

GONE = frozenset({404, 410})

RUN_ENDPOINTS = frozenset(
    endpoint(name).name
    for name in (
        "forward",
        "forward_backward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "retrieve_future",
    )
)
"""Calls that refer to nothing but a run: a 404 or 410 to one of them means that the run is missing, or the result of one of its
operations, which a server deletes only together with the run or later."""

StatusReply: TypeAlias = TrainingRun | Exception


def condition_of(reply: StatusReply, no_reply_s: float, unreachable_after_s: float) -> Condition | None:
    """The condition of a run, from the latest reply about it and the time since the last reply; None while it is usable.

    >>> condition_of(APIConnectionError(), no_reply_s=400.0, unreachable_after_s=300.0)
    'unreachable'
    """
    if isinstance(reply, TrainingRun):
        return "corrupted" if reply.corrupted else None
    if says_gone(reply):
        return "lost"
    unreachable = isinstance(reply, APIConnectionError | TimeoutError) or (
        isinstance(reply, APIStatusError) and is_transient(reply.status_code)
    )
    return "unreachable" if unreachable and no_reply_s >= unreachable_after_s else None


def says_gone(error: BaseException) -> bool:
    """Whether the server replied that the object does not exist (404) or no longer exists (410)."""
    return isinstance(error, APIStatusError) and error.status_code in GONE


def says_run_is_gone(error: BaseException) -> bool:
    """Whether the server rejected an operation of a run because the run no longer exists."""
    if not isinstance(error, APIStatusError) or not says_gone(error) or error.request is None:
        return False
    return error.request.endpoint in RUN_ENDPOINTS


def is_interruption(error: BaseException) -> bool:
    """Whether an operation of a run failed because of the server or the network.

    The outcome of the operation is then unknown, or the server did not execute a valid operation.

    >>> is_interruption(RequestFailedError("worker died", "r1", RequestErrorCategory.Server))
    True
    >>> is_interruption(ValueError("mine"))
    False
    """
    match error:
        case APIConnectionError() | ResultExpiredError():
            return True
        case APIStatusError():
            return is_transient(error.status_code) and error.status_code != 409
        case RequestFailedError():
            return error.category is not RequestErrorCategory.User
    return False


def outcome_of(error: BaseException) -> Outcome | GiveUp:
    """A failed attempt as the retry policy sees it; :class:`GiveUp` for errors that another attempt would repeat."""
    match error:
        case APIStatusError():
            return ErrorStatus(error.status_code, getattr(error.response, "headers", {}))
        case APIConnectionError() | TimeoutError() | ResultExpiredError():
            return NoReply()
        case RequestFailedError() if error.category is not RequestErrorCategory.User:
            return NoReply()
    return GiveUp()
