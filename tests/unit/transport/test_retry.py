"""The retry policy, as a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex._transport.connection import ConnectionRejected
from tinkex._transport.retry import (
    NO_RETRIES,
    ErrorStatus,
    GiveUp,
    NoReply,
    Outcome,
    Rejected,
    Retry,
    RetryPolicy,
    Unreachable,
    backoff,
    decide,
    retry_after,
    without_reply,
)
from tinkex.errors import APIConnectionError

POLICY = RetryPolicy()
NOON, LATER = "Sun, 15 Nov 2026 12:00:00 GMT", "Sun, 15 Nov 2026 12:00:07 GMT"


@pytest.mark.parametrize(
    ("outcome", "attempt", "elapsed", "expected"),
    [
        # what may pass is tried again, at growing distances
        (NoReply(), 0, 0.0, Retry(0.5)),
        (NoReply(), 1, 0.5, Retry(1.0)),
        (NoReply(), 4, 10.0, Retry(8.0)),
        (NoReply(), 5, 10.0, Retry(10.0)),
        (NoReply(), 500, 10.0, Retry(10.0)),
        (ErrorStatus(408), 0, 0.0, Retry(0.5)),
        (ErrorStatus(409), 0, 0.0, Retry(0.5)),
        (ErrorStatus(429), 0, 0.0, Retry(0.5)),
        (ErrorStatus(500), 0, 0.0, Retry(0.5)),
        (ErrorStatus(503), 3, 0.0, Retry(4.0)),
        (ErrorStatus(599), 0, 0.0, Retry(0.5)),
        # a server that was never reached is tried for a few seconds: 0.5 + 1 + 2 + 4
        (Unreachable(), 0, 0.0, Retry(0.5)),
        (Unreachable(), 3, 3.5, Retry(4.0)),
        (Unreachable(), 4, 7.5, GiveUp()),
        # what will not pass is not
        (Rejected(), 0, 0.0, GiveUp()),
        (ErrorStatus(400), 0, 0.0, GiveUp()),
        (ErrorStatus(401), 0, 0.0, GiveUp()),
        (ErrorStatus(402), 0, 0.0, GiveUp()),
        (ErrorStatus(403), 0, 0.0, GiveUp()),
        (ErrorStatus(404), 0, 0.0, GiveUp()),
        (ErrorStatus(410), 0, 0.0, GiveUp()),
        (ErrorStatus(422), 0, 0.0, GiveUp()),
        (ErrorStatus(501), 0, 0.0, GiveUp()),
        (ErrorStatus(302), 0, 0.0, GiveUp()),
        # the server has the last word
        (ErrorStatus(503, {"x-should-retry": "false"}), 0, 0.0, GiveUp()),
        (ErrorStatus(404, {"x-should-retry": "true"}), 0, 0.0, Retry(0.5)),
        (ErrorStatus(429, {"retry-after": "3"}), 0, 0.0, Retry(3.0)),
        (ErrorStatus(429, {"retry-after": "0.25"}), 0, 0.0, Retry(0.25)),
        (ErrorStatus(503, {"retry-after-ms": "1500", "retry-after": "9"}), 0, 0.0, Retry(1.5)),
        (ErrorStatus(503, {"retry-after": "3600"}), 0, 0.0, Retry(60.0)),
        (ErrorStatus(503, {"retry-after": LATER, "date": NOON}), 0, 0.0, Retry(7.0)),
        (ErrorStatus(503, {"retry-after": LATER}), 0, 0.0, Retry(0.5)),
        (ErrorStatus(503, {"retry-after": "soon", "date": NOON}), 0, 0.0, Retry(0.5)),
        (ErrorStatus(503, {"retry-after": "-1"}), 0, 0.0, Retry(0.5)),
        (ErrorStatus(503, {"retry-after": "nan"}), 0, 0.0, Retry(0.5)),
        # patience ends
        (NoReply(), 9, 291.0, GiveUp()),
        (NoReply(), 0, 299.5, Retry(0.5)),
        (ErrorStatus(429, {"retry-after": "30"}), 0, 280.0, GiveUp()),
    ],
)
def test_the_table(outcome: Outcome, attempt: int, elapsed: float, expected: Retry | GiveUp) -> None:
    assert decide(outcome, attempt, elapsed, POLICY, lambda: 0.0) == expected


@pytest.mark.parametrize(
    "outcome", [NoReply(), ErrorStatus(503), ErrorStatus(404, {"x-should-retry": "true"})]
)
def test_a_call_that_is_never_retried_is_not(outcome: Outcome) -> None:
    assert decide(outcome, 0, 0.0, NO_RETRIES, lambda: 0.0) == GiveUp()


def test_a_number_of_retries_is_kept_to() -> None:
    policy = RetryPolicy(max_retries=2)
    steps = [decide(NoReply(), attempt, 0.0, policy, lambda: 0.0) for attempt in range(3)]
    assert [isinstance(step, Retry) for step in steps] == [True, True, False]


def test_a_payment_pause_is_waited_out_in_steps_of_five_seconds() -> None:
    policy = RetryPolicy(payment_pause_s=3600.0, total_s=300.0)
    assert decide(ErrorStatus(402), 100, 3599.0, policy, lambda: 0.0) == Retry(5.0)
    assert decide(ErrorStatus(402), 100, 3600.0, policy, lambda: 0.0) == GiveUp()


def test_a_status_to_be_raised_is_not_retried() -> None:
    policy = RetryPolicy(raised_statuses=frozenset({429}))
    assert decide(ErrorStatus(429), 0, 0.0, policy, lambda: 0.0) == GiveUp()
    assert decide(ErrorStatus(503), 0, 0.0, policy, lambda: 0.0) == Retry(0.5)


@given(
    attempt=st.integers(0, 10_000),
    luck=st.floats(0, 1),
    elapsed=st.floats(0, 1000),
    status=st.integers(200, 599),
)
def test_no_wait_is_longer_than_its_bounds(attempt: int, luck: float, elapsed: float, status: int) -> None:
    wait = backoff(attempt, POLICY, lambda: luck)
    assert 0.75 * min(0.5 * 2 ** min(attempt, 10), 10) <= wait <= 10
    step = decide(ErrorStatus(status), attempt, elapsed, POLICY, lambda: luck)
    if isinstance(step, Retry):
        assert elapsed + step.after <= 300


@given(st.text(max_size=20))
def test_no_header_text_breaks_the_reading(text: str) -> None:
    wait = retry_after({"retry-after": text, "date": NOON}, 60.0)
    assert wait is None or 0 < wait <= 60


def test_an_explicit_number_of_retries_also_holds_for_a_server_that_was_never_reached() -> None:
    policy = RetryPolicy(max_retries=6)
    assert isinstance(decide(Unreachable(), 5, 15.5, policy, lambda: 0.0), Retry)
    assert decide(Unreachable(), 6, 25.5, policy, lambda: 0.0) == GiveUp()


@pytest.mark.parametrize(("contacted", "expected"), [(False, Rejected()), (True, NoReply())])
def test_a_certificate_is_rejected_for_good_only_where_the_server_has_never_replied(
    contacted: bool, expected: Outcome
) -> None:
    error = APIConnectionError(None, "its certificate has expired")
    error.__cause__ = ConnectionRejected("expired")
    assert without_reply(error, contacted=contacted) == expected
