"""Submits samples at the rate that the server accepts: after a 429 or 402 the same request is submitted again after a pause."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from tinkex._transport.retry import retry_after
from tinkex._wire.endpoints import endpoint
from tinkex.errors import APIStatusError, BillingError, RateLimitError
from tinkex.observability.events import SamplingPaused

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller
    from tinkex.clients.session import OpenSession

__all__ = ["submit_paced"]

T = TypeVar("T")

_SAMPLE = endpoint("asample")


async def submit_paced(
    opened: OpenSession, caller: Caller, submission: Callable[[], Awaitable[T]], size: int
) -> T:
    """Returns the result of a submission of a prompt of this size; raises ``ClosedError`` if the client is closed."""
    limiter = opened.sampling

    async def pause() -> None:
        async with caller.closable(_SAMPLE):
            await limiter.wait()

    began = time.monotonic()
    max_pause_s = opened.client_config.billing_exception_max_pause_duration_sec
    while True:
        try:
            return await limiter.admit(size, submission, pause)
        except (RateLimitError, BillingError) as error:
            if isinstance(error, BillingError) and time.monotonic() - began >= max_pause_s:
                raise
            pause_s = limiter.report_backpressure(size, retry_after(error.response.headers, 60.0))
            caller.sink.emit(SamplingPaused(opened.session_id, pause_s, _reason(error), size))
            await pause()


def _reason(error: APIStatusError) -> str | None:
    """Why the server rejected a sample, in its own words."""
    body = error.body if isinstance(error.body, dict) else {}
    said = body.get("queue_state_reason") or body.get("detail") or body.get("message") or body.get("error")
    return said if isinstance(said, str) else None
