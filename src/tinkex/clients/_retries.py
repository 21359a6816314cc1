"""The retries of a sampling client, for whole samples and for streams."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex._transport.retry import Retry, decide
from tinkex._wire.endpoints import endpoint
from tinkex.errors import APIStatusError
from tinkex.observability.events import RetryScheduled

if TYPE_CHECKING:
    from tinkex._transport.retry import RetryPolicy
    from tinkex.clients.retry_config import RetryConfig
    from tinkex.clients.session import Session

__all__ = ["Retries"]


@dataclass(frozen=True)
class Retries:
    """The retries of one client: its settings, and what its server allows."""

    config: RetryConfig
    policy: RetryPolicy
    allowed: bool
    """False if the server does not allow retries."""
    session: Session

    @property
    def submits_once(self) -> bool:
        """Whether a submission is not retried by itself: it counts as one of the attempts, or there is one attempt only."""
        bounded = self.allowed and self.policy.max_retries is not None
        return bounded or not self.config.enable_retry_logic

    @property
    def kinds(self) -> tuple[type[Exception], ...]:
        """The errors that :meth:`pause` decides about."""
        return (APIStatusError, *self.config.retryable_exceptions)

    async def pause(self, operation: str, error: Exception, attempt: int, elapsed: float) -> None:
        """Waits before the next attempt, or raises the error if it must not be retried."""
        outcome = self.config.outcome(error)
        if outcome is None or not self.allowed or not self.config.enable_retry_logic:
            raise error
        step = decide(outcome, attempt, elapsed, self.policy, random.random)
        if not isinstance(step, Retry):
            raise error
        caller = self.session.caller
        caller.sink.emit(RetryScheduled(operation, attempt, step.after, str(error)))
        async with caller.closable(endpoint(operation)):
            await asyncio.sleep(step.after)
        self.session.check_open()  # a closed client does not retry
