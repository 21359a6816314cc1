"""Errors say whether a retry can help and when; ``with_retry`` follows them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

import tinkex
from tests.recording import Recorder
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    Busy,
    CircuitOpenError,
    ClosedError,
    ConfigError,
    HttpResponse,
    InvalidInput,
    RequestErrorCategory,
    RequestFailedError,
    ResultExpiredError,
    TinkexError,
    status_error,
)
from tinkex.observability.events import RetryScheduled

FAST = tinkex.RetryConfig(retry_delay_base=0.001, retry_delay_max=0.002)


def failed(category: RequestErrorCategory) -> RequestFailedError:
    return RequestFailedError("it failed", "request-1", category)


def test_a_date_without_the_date_of_the_response_is_compared_with_the_clock() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(hours=1))
    waited = status_error(HttpResponse(503, {"retry-after": later}), None).retry_after_ms
    assert waited is not None
    assert 0 < waited <= 3_600_000


@pytest.mark.parametrize(
    ("status", "body", "category"),
    [
        *((status, None, "user") for status in (400, 401, 403, 404, 422)),
        *((status, None, "server") for status in (408, 409, 410, 429, 500, 503)),
        (302, None, "unknown"),
        (500, {"category": "USER"}, "user"),
        (400, {"category": "server"}, "server"),
        (400, {"category": "weather"}, "unknown"),
        (400, ["no mapping"], "user"),
    ],
)
def test_an_error_says_who_is_at_fault(status: int, body: object, category: str) -> None:
    error = APIStatusError("failed", HttpResponse(status), body)
    assert error.category is RequestErrorCategory(category)


@pytest.mark.parametrize(
    ("error", "retryable", "retry_after_ms"),
    [
        *((status_error(HttpResponse(status), None), False, None) for status in (400, 401, 403, 404, 410)),
        *((status_error(HttpResponse(status), None), False, None) for status in (422, 501, 507)),
        *((status_error(HttpResponse(status), None), True, None) for status in (408, 409, 429, 500, 503)),
        (status_error(HttpResponse(429, {"retry-after": "2"}), None), True, 2000),
        (status_error(HttpResponse(503, {"retry-after-ms": "250"}), None), True, 250),
        (status_error(HttpResponse(503, {"Retry-After": "3"}), None), True, 3000),
        (status_error(HttpResponse(503), {"retry_after_ms": 40}), True, 40),
        (status_error(HttpResponse(503), {"category": "user"}), False, None),
        (status_error(HttpResponse(503, {"x-should-retry": "false"}), None), False, None),
        (status_error(HttpResponse(400, {"x-should-retry": "true"}), None), True, None),
        (APIStatusError("teapot", HttpResponse(418)), False, None),
        (APIConnectionError(), True, None),
        (CircuitOpenError(retry_after_s=1.5), True, 1500),
        (failed(RequestErrorCategory.User), False, None),
        (failed(RequestErrorCategory.Server), True, None),
        (failed(RequestErrorCategory.Unknown), True, None),
        (ResultExpiredError("deleted", "request-1"), True, None),
        (APIResponseValidationError(None), False, None),
        (ClosedError("closed"), False, None),
        (ConfigError("wrong"), False, None),
        (Busy("full"), True, None),
        (InvalidInput("wrong"), False, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TinkexError) else str(value),
)
def test_an_error_says_whether_and_when_to_retry(
    error: TinkexError, retryable: bool, retry_after_ms: int | None
) -> None:
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (one.retryable, one.retry_after_ms) == (retryable, retry_after_ms)


@pytest.mark.parametrize(
    ("category", "retryable"), [("user", False), ("server", True), ("unknown", True), ("news", True)]
)
def test_only_the_users_own_failures_are_final(category: str, retryable: bool) -> None:
    assert RequestErrorCategory.parse(category).retryable is retryable


def flaky(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def operation() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return operation


@pytest.mark.parametrize(
    "errors",
    [
        [],
        [APIConnectionError(), failed(RequestErrorCategory.Server)],
        [status_error(HttpResponse(503), None), ResultExpiredError("deleted", "request-1")],
        [TimeoutError("slow")],
    ],
    ids=["none", "no-reply", "status", "timeout"],
)
async def test_temporary_failures_are_retried_and_reported(errors: list[Exception]) -> None:
    recorder = Recorder()
    assert tinkex.with_retry(flaky(*errors), FAST, events=recorder) == "done"
    retries = [event for event in recorder.events if isinstance(event, RetryScheduled)]
    assert [event.attempt for event in retries] == list(range(len(errors)))

    operation = flaky(*errors)

    async def awaited() -> str:
        return operation()

    assert await tinkex.with_retry_async(awaited, FAST) == "done"


@pytest.mark.parametrize(
    ("error", "config"),
    [
        (failed(RequestErrorCategory.User), FAST),
        (status_error(HttpResponse(404), None), FAST),
        (ValueError("a mistake"), FAST),
        (APIConnectionError(), tinkex.RetryConfig(enable_retry_logic=False)),
        (
            status_error(HttpResponse(503, {"retry-after": "30"}), None),
            tinkex.RetryConfig(progress_timeout=5),
        ),
    ],
    ids=["user", "status", "other", "disabled", "too-long"],
)
async def test_final_failures_are_raised_at_the_first_attempt(
    error: Exception, config: tinkex.RetryConfig
) -> None:
    recorder = Recorder()
    with pytest.raises(type(error)):
        tinkex.with_retry(flaky(error), config, events=recorder)
    operation = flaky(error)

    async def awaited() -> str:
        return operation()

    with pytest.raises(type(error)):
        await tinkex.with_retry_async(awaited, config, events=recorder)
    assert recorder.events == []


def test_listed_exceptions_are_retried_too() -> None:
    listed = tinkex.RetryConfig(
        retry_delay_base=0.001, retry_delay_max=0.002, retryable_exceptions=(KeyError,)
    )
    assert tinkex.with_retry(flaky(KeyError("a")), listed) == "done"
