"""The retry policy, as a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex._transport.retry import (
    NEVER,
    Answered,
    GiveUp,
    Outcome,
    Retry,
    RetryPolicy,
    Unanswered,
    backoff,
    decide,
    server_wait,
)

POLICY = RetryPolicy()
NOON, LATER = "Sun, 15 Nov 2026 12:00:00 GMT", "Sun, 15 Nov 2026 12:00:07 GMT"


@pytest.mark.parametrize(
    ("outcome", "attempt", "elapsed", "expected"),
    [
        # what may pass is tried again, at growing distances
        (Unanswered(), 0, 0.0, Retry(0.5)),
        (Unanswered(), 1, 0.5, Retry(1.0)),
        (Unanswered(), 4, 10.0, Retry(8.0)),
        (Unanswered(), 5, 10.0, Retry(10.0)),
        (Unanswered(), 500, 10.0, Retry(10.0)),
        (Answered(408), 0, 0.0, Retry(0.5)),
        (Answered(409), 0, 0.0, Retry(0.5)),
        (Answered(429), 0, 0.0, Retry(0.5)),
        (Answered(500), 0, 0.0, Retry(0.5)),
        (Answered(503), 3, 0.0, Retry(4.0)),
        (Answered(599), 0, 0.0, Retry(0.5)),
        # what will not pass is not
        (Answered(400), 0, 0.0, GiveUp()),
        (Answered(401), 0, 0.0, GiveUp()),
        (Answered(402), 0, 0.0, GiveUp()),
        (Answered(403), 0, 0.0, GiveUp()),
        (Answered(404), 0, 0.0, GiveUp()),
        (Answered(410), 0, 0.0, GiveUp()),
        (Answered(422), 0, 0.0, GiveUp()),
        (Answered(501), 0, 0.0, GiveUp()),
        (Answered(302), 0, 0.0, GiveUp()),
        # the server has the last word
        (Answered(503, {"x-should-retry": "false"}), 0, 0.0, GiveUp()),
        (Answered(404, {"x-should-retry": "true"}), 0, 0.0, Retry(0.5)),
        (Answered(429, {"retry-after": "3"}), 0, 0.0, Retry(3.0)),
        (Answered(429, {"retry-after": "0.25"}), 0, 0.0, Retry(0.25)),
        (Answered(503, {"retry-after-ms": "1500", "retry-after": "9"}), 0, 0.0, Retry(1.5)),
        (Answered(503, {"retry-after": "3600"}), 0, 0.0, Retry(60.0)),
        (Answered(503, {"retry-after": LATER, "date": NOON}), 0, 0.0, Retry(7.0)),
        (Answered(503, {"retry-after": LATER}), 0, 0.0, Retry(0.5)),
        (Answered(503, {"retry-after": "soon", "date": NOON}), 0, 0.0, Retry(0.5)),
        (Answered(503, {"retry-after": "-1"}), 0, 0.0, Retry(0.5)),
        (Answered(503, {"retry-after": "nan"}), 0, 0.0, Retry(0.5)),
        # patience ends
        (Unanswered(), 9, 291.0, GiveUp()),
        (Unanswered(), 0, 299.5, Retry(0.5)),
        (Answered(429, {"retry-after": "30"}), 0, 280.0, GiveUp()),
    ],
)
def test_the_table(outcome: Outcome, attempt: int, elapsed: float, expected: Retry | GiveUp) -> None:
    assert decide(outcome, attempt, elapsed, POLICY, lambda: 0.0) == expected


@pytest.mark.parametrize("outcome", [Unanswered(), Answered(503), Answered(404, {"x-should-retry": "true"})])
def test_a_call_that_is_never_retried_is_not(outcome: Outcome) -> None:
    assert decide(outcome, 0, 0.0, NEVER, lambda: 0.0) == GiveUp()


def test_a_number_of_retries_is_kept_to() -> None:
    policy = RetryPolicy(max_retries=2)
    steps = [decide(Unanswered(), attempt, 0.0, policy, lambda: 0.0) for attempt in range(3)]
    assert [isinstance(step, Retry) for step in steps] == [True, True, False]


def test_a_payment_pause_is_waited_out_in_steps_of_five_seconds() -> None:
    policy = RetryPolicy(payment_pause_s=3600.0, total_s=300.0)
    assert decide(Answered(402), 100, 3599.0, policy, lambda: 0.0) == Retry(5.0)
    assert decide(Answered(402), 100, 3600.0, policy, lambda: 0.0) == GiveUp()


def test_a_status_handed_back_is_left_to_its_caller() -> None:
    policy = RetryPolicy(handed_back=frozenset({429}))
    assert decide(Answered(429), 0, 0.0, policy, lambda: 0.0) == GiveUp()
    assert decide(Answered(503), 0, 0.0, policy, lambda: 0.0) == Retry(0.5)


@given(
    attempt=st.integers(0, 10_000),
    luck=st.floats(0, 1),
    elapsed=st.floats(0, 1000),
    status=st.integers(200, 599),
)
def test_no_wait_is_longer_than_its_bounds(attempt: int, luck: float, elapsed: float, status: int) -> None:
    wait = backoff(attempt, POLICY, lambda: luck)
    assert 0.75 * min(0.5 * 2 ** min(attempt, 10), 10) <= wait <= 10
    step = decide(Answered(status), attempt, elapsed, POLICY, lambda: luck)
    if isinstance(step, Retry):
        assert elapsed + step.after <= 300


@given(st.text(max_size=20))
def test_no_header_text_breaks_the_reading(text: str) -> None:
    wait = server_wait({"retry-after": text, "date": NOON}, 60.0)
    assert wait is None or 0 < wait <= 60
