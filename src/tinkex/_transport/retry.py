"""The retry policy: one pure function that says whether a failed request is tried again, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import TypeAlias

__all__ = [
    "NEVER",
    "Answered",
    "GiveUp",
    "Outcome",
    "Retry",
    "RetryPolicy",
    "Unanswered",
    "backoff",
    "decide",
    "is_transient",
    "server_wait",
]

PAYMENT_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How patient a call is.

    ``max_retries`` None means: as many as fit into ``total_s``. ``payment_pause_s`` is how long a 402
    (the account cannot pay) is waited out instead of raised. Statuses in ``handed_back`` are never tried
    again here: their caller has its own way with them.
    """

    max_retries: int | None = None
    total_s: float = 300.0
    base_s: float = 0.5
    cap_s: float = 10.0
    jitter: float = 0.25
    server_wait_cap_s: float = 60.0
    payment_pause_s: float = 0.0
    handed_back: frozenset[int] = frozenset()


NEVER = RetryPolicy(max_retries=0)
"""For calls whose caller has a loop of its own."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The server answered with an error status."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unanswered:
    """There was no usable answer: a timeout, a broken connection, a proxy's empty refusal."""


Outcome: TypeAlias = Answered | Unanswered


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after so many seconds."""

    after: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise the error to the caller."""


def decide(
    outcome: Outcome,
    attempt: int,
    elapsed: float,
    policy: RetryPolicy,
    random: Callable[[], float],
) -> Retry | GiveUp:
    """What to do after try number ``attempt`` (from 0), ``elapsed`` seconds after the first one began.

    Transient failures (no answer, 408, 409, 429, 5xx except 501 and 507) are tried again after 0.5·2^attempt seconds,
    at most 10, less up to a quarter at random; ``retry-after`` replaces that wait, up to a minute;
    ``x-should-retry`` overrides the status. Nothing is tried again once the policy's total time is over.

    >>> decide(Answered(503), 2, 1.5, RetryPolicy(), random=lambda: 0.0)
    Retry(after=2.0)
    >>> decide(Answered(404), 0, 0.0, RetryPolicy(), random=lambda: 0.0)
    GiveUp()
    """
    if policy.max_retries is not None and attempt >= policy.max_retries:
        return GiveUp()
    if isinstance(outcome, Answered):
        wish = outcome.headers.get("x-should-retry", "").strip().lower()
        if wish == "false" or outcome.status in policy.handed_back:
            return GiveUp()
        if outcome.status == 402 and wish != "true":
            return Retry(PAYMENT_PAUSE_S) if elapsed < policy.payment_pause_s else GiveUp()
        if wish != "true" and not is_transient(outcome.status):
            return GiveUp()
        asked = server_wait(outcome.headers, policy.server_wait_cap_s)
    else:
        asked = None
    after = backoff(attempt, policy, random) if asked is None else asked
    return Retry(after) if elapsed + after <= policy.total_s else GiveUp()


def is_transient(status: int) -> bool:
    """Whether the same request may well succeed later; 501 says that it never will, 507 not before something is deleted.

    >>> [status for status in (400, 408, 409, 410, 429, 500, 501, 503, 507) if is_transient(status)]
    [408, 409, 429, 500, 503]
    """
    return status in {408, 409, 429} or (status >= 500 and status not in {501, 507})


def backoff(attempt: int, policy: RetryPolicy, random: Callable[[], float]) -> float:
    """The client's own wait before the next try."""
    wait = min(policy.base_s * 2.0 ** min(attempt, 60), policy.cap_s)
    return wait * (1.0 - policy.jitter * random())


def server_wait(headers: Mapping[str, str], cap_s: float) -> float | None:
    """The wait the server asks for, at most ``cap_s``; None if it asks for none that can be read.

    A date is compared with the reply's own ``date``, so a wrong local clock does no harm.

    >>> server_wait({"retry-after": "3"}, 60.0), server_wait({"retry-after-ms": "250"}, 60.0)
    (3.0, 0.25)
    """
    seconds = _number(headers.get("retry-after-ms"))
    if seconds is not None:
        seconds /= 1000.0
    else:
        stated = headers.get("retry-after")
        seconds = _number(stated)
        if seconds is None and stated is not None:
            seconds = _seconds_between(headers.get("date"), stated)
    if seconds is None or not seconds > 0:
        return None
    return min(seconds, cap_s)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _seconds_between(start: str | None, end: str) -> float | None:
    if start is None:
        return None
    try:
        return (parsedate_to_datetime(end) - parsedate_to_datetime(start)) / timedelta(seconds=1)
    except (TypeError, ValueError):
        return None
