"""The retry policy: one pure function that decides whether a failed request is sent again, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import TypeAlias

__all__ = [
    "NO_RETRIES",
    "ErrorStatus",
    "GiveUp",
    "NoReply",
    "Outcome",
    "Retry",
    "RetryPolicy",
    "backoff",
    "decide",
    "is_transient",
    "retry_after",
]

PAYMENT_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long a call is retried.

    ``max_retries`` None means: as many as fit into ``total_s``. For ``payment_pause_s`` seconds a 402 (the account
    cannot pay) is retried instead of raised. Statuses in ``raised_statuses`` are never retried: the caller handles them.
    """

    max_retries: int | None = None
    total_s: float = 300.0
    base_s: float = 0.5
    cap_s: float = 10.0
    jitter: float = 0.25
    server_wait_cap_s: float = 60.0
    payment_pause_s: float = 0.0
    raised_statuses: frozenset[int] = frozenset()


NO_RETRIES = RetryPolicy(max_retries=0)
"""For calls whose caller has a retry loop of its own."""


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """The server replied with an error status."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NoReply:
    """There was no usable reply: a timeout, a lost connection, a proxy's empty 400."""


Outcome: TypeAlias = ErrorStatus | NoReply


@dataclass(frozen=True, slots=True)
class Retry:
    """Send the request again after so many seconds."""

    after: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise the error to the caller."""


def decide(
    outcome: Outcome,
    attempt: int,
    elapsed: float,
    policy: RetryPolicy,
    rng: Callable[[], float],
) -> Retry | GiveUp:
    """What to do after attempt number ``attempt`` (from 0), ``elapsed`` seconds after the first one began.

    Transient failures (no reply, 408, 409, 429, 5xx except 501 and 507) are retried after 0.5·2^attempt seconds,
    at most 10, less up to a quarter at random; ``retry-after`` replaces that wait, up to a minute;
    ``x-should-retry`` overrides the status. Nothing is retried after the policy's total time.

    >>> decide(ErrorStatus(503), 2, 1.5, RetryPolicy(), rng=lambda: 0.0)
    Retry(after=2.0)
    >>> decide(ErrorStatus(404), 0, 0.0, RetryPolicy(), rng=lambda: 0.0)
    GiveUp()
    """
    if policy.max_retries is not None and attempt >= policy.max_retries:
        return GiveUp()
    if isinstance(outcome, ErrorStatus):
        override = outcome.headers.get("x-should-retry", "").strip().lower()
        if override == "false" or outcome.status in policy.raised_statuses:
            return GiveUp()
        if outcome.status == 402 and override != "true":
            return Retry(PAYMENT_PAUSE_S) if elapsed < policy.payment_pause_s else GiveUp()
        if override != "true" and not is_transient(outcome.status):
            return GiveUp()
        requested = retry_after(outcome.headers, policy.server_wait_cap_s)
    else:
        requested = None
    after = backoff(attempt, policy, rng) if requested is None else requested
    return Retry(after) if elapsed + after <= policy.total_s else GiveUp()


def is_transient(status: int) -> bool:
    """Whether the same request can succeed later; with 501 it never does, with 507 not before something is deleted.

    >>> [status for status in (400, 408, 409, 410, 429, 500, 501, 503, 507) if is_transient(status)]
    [408, 409, 429, 500, 503]
    """
    return status in {408, 409, 429} or (status >= 500 and status not in {501, 507})


def backoff(attempt: int, policy: RetryPolicy, rng: Callable[[], float]) -> float:
    """The client's own wait before the next attempt."""
    wait = min(policy.base_s * 2.0 ** min(attempt, 60), policy.cap_s)
    return wait * (1.0 - policy.jitter * rng())


def retry_after(headers: Mapping[str, str], cap_s: float) -> float | None:
    """The wait that the server requests, at most ``cap_s`` seconds; None if it requests none, or it cannot be parsed.

    A date is compared with the reply's own ``date``, so the local clock may be wrong.

    >>> retry_after({"retry-after": "3"}, 60.0), retry_after({"retry-after-ms": "250"}, 60.0)
    (3.0, 0.25)
    """
    seconds = _number(headers.get("retry-after-ms"))
    if seconds is not None:
        seconds /= 1000.0
    else:
        text = headers.get("retry-after")
        seconds = _number(text)
        if seconds is None and text is not None:
            seconds = _seconds_between(headers.get("date"), text)
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
