"""What answers and errors say about a run: pure functions, no questions asked."""

from __future__ import annotations

from typing import TypeAlias

from tinkex._transport.retry import Answered, GiveUp, Outcome, Unanswered, is_transient
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

RUN_OPERATIONS = frozenset(
    {
        "forward",
        "forward_backward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "retrieve_future",
    }
)
"""Calls that are about nothing but a run: what they do not find is the run, or the result of an operation of it, which a
server forgets only together with the run or after it."""

Answer: TypeAlias = TrainingRun | Exception


def condition_of(answer: Answer, silent_s: float, unreachable_after_s: float) -> Condition | None:
    """How a run is, by the answer to the question and how long there has been none; None: nothing is wrong, or not yet.

    >>> condition_of(APIConnectionError(), silent_s=400.0, unreachable_after_s=300.0)
    'unreachable'
    """
    if isinstance(answer, TrainingRun):
        return "corrupted" if answer.corrupted else None
    if says_gone(answer):
        return "lost"
    silent = isinstance(answer, APIConnectionError | TimeoutError) or (
        isinstance(answer, APIStatusError) and is_transient(answer.status_code)
    )
    return "unreachable" if silent and silent_s >= unreachable_after_s else None


def says_gone(error: BaseException) -> bool:
    """Whether a server answered that it does not have what it was asked about, and will not have it again."""
    return isinstance(error, APIStatusError) and error.status_code in GONE


def says_run_is_gone(error: BaseException) -> bool:
    """Whether an operation of a run was refused because the server does not have the run any more."""
    if not isinstance(error, APIStatusError) or not says_gone(error) or error.request is None:
        return False
    return error.request.url.rpartition("/")[2] in RUN_OPERATIONS


def is_interruption(error: BaseException) -> bool:
    """Whether an operation of a run failed for reasons that lie with the server or the way to it.

    What came of the operation is then unknown, or it was not carried out though nothing is wrong with it.

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
    """A failed try in terms of the one retry policy; what will fail again in the same way is given up."""
    match error:
        case APIStatusError():
            return Answered(error.status_code, getattr(error.response, "headers", {}))
        case APIConnectionError() | TimeoutError() | ResultExpiredError():
            return Unanswered()
        case RequestFailedError() if error.category is not RequestErrorCategory.User:
            return Unanswered()
    return GiveUp()
