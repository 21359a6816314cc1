"""The retry policy: one pure function that decides whether a failed request is sent again, and when."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tinkex._transport.connection import ConnectionRejected
from tinkex.errors import APIConnectionError, CircuitOpenError
from tinkex.errors.transience import is_transient, retry_after

__all__ = [
    "NO_RETRIES",
    "ErrorStatus",
    "GiveUp",
    "NoReply",
    "Outcome",
    "Rejected",
    "Retry",
    "RetryPolicy",
    "Unreachable",
    "backoff",
    "decide",
    "is_transient",
    "retry_after",
    "without_reply",
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
    first_contact_s: float = 8.0
    """Bounds the retries of a server that has never replied and refuses connections, unless ``max_retries`` is set."""


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


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No connection could be made, and the server has not replied to this client before: the address may be wrong."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A certificate or a proxy does not allow the connection, and the server has not replied to this client before."""


Outcome: TypeAlias = ErrorStatus | NoReply | Unreachable | Rejected


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
    ``x-should-retry`` overrides the status. Nothing is retried after the policy's total time, for a server that was
    never reached after ``first_contact_s``, or where a certificate or a proxy does not allow the first connection.

    >>> decide(ErrorStatus(503), 2, 1.5, RetryPolicy(), rng=lambda: 0.0)
    Retry(after=2.0)
    >>> decide(ErrorStatus(404), 0, 0.0, RetryPolicy(), rng=lambda: 0.0)
    GiveUp()
    """
    if isinstance(outcome, Rejected) or (policy.max_retries is not None and attempt >= policy.max_retries):
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
    total_s = policy.total_s
    if isinstance(outcome, Unreachable) and policy.max_retries is None:
        total_s = min(total_s, policy.first_contact_s)
    return Retry(after) if elapsed + after <= total_s else GiveUp()


def without_reply(error: APIConnectionError, *, contacted: bool) -> NoReply | Unreachable | Rejected:
    """The outcome of a request without a reply; ``contacted`` is whether the server has replied to an earlier one.

    Where it never has, the error gets a note about the address.

    >>> from tinkex.errors import APIConnectionError
    >>> without_reply(APIConnectionError(None, "lost"), contacted=True)
    NoReply()
    """
    cause = error.__cause__
    if isinstance(cause, ConnectionRejected):
        return NoReply() if contacted else Rejected()
    # pyqwest raises a plain ConnectionError for every failure to connect; the others are for connections that broke.
    refused = isinstance(cause, ConnectionRefusedError | socket.gaierror) or type(cause) is ConnectionError
    if contacted or not (refused or isinstance(error, CircuitOpenError)):
        return NoReply()
    error.add_note("The server has never replied: check base_url, and that the server runs.")
    return Unreachable()


def backoff(attempt: int, policy: RetryPolicy, rng: Callable[[], float]) -> float:
    """The client's own wait before the next attempt."""
    wait = min(policy.base_s * 2.0 ** min(attempt, 60), policy.cap_s)
    return wait * (1.0 - policy.jitter * rng())
