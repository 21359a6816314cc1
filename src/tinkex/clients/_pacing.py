"""Submits samples at the pace the server can take: while it pushes back (429, 402), the same one waits and goes again."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from tinkex._transport.retry import server_wait
from tinkex._wire.endpoints import endpoint
from tinkex.errors import BillingError, RateLimitError
from tinkex.observability.events import SamplingPaused

if TYPE_CHECKING:
    from tinkex._transport.caller import Caller
    from tinkex.clients.session import OpenSession

__all__ = ["paced"]

T = TypeVar("T")

_SAMPLE = endpoint("asample")


async def paced(opened: OpenSession, caller: Caller, submission: Callable[[], Awaitable[T]], size: int) -> T:
    """What a submission of a prompt of this size returns, once the server takes it; ``ClosedError`` with the client."""
    limiter = opened.sampling

    async def pause() -> None:
        async with caller.closable(_SAMPLE):
            await limiter.wait()

    began = time.monotonic()
    longest_s = opened.client_config.billing_exception_max_pause_duration_sec
    while True:
        try:
            return await limiter.admit(size, submission, pause)
        except (RateLimitError, BillingError) as error:
            if isinstance(error, BillingError) and time.monotonic() - began >= longest_s:
                raise
            pause_s = limiter.push_back(size, server_wait(error.response.headers, 60.0))
            caller.sink.emit(SamplingPaused(opened.session_id, pause_s))
            await pause()
