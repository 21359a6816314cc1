"""Retries of a function of the program, with the client's own policy."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from tinkex._transport.retry import NoReply, Retry, decide
from tinkex.clients.retry_config import RetryConfig
from tinkex.errors import TinkexError
from tinkex.observability.events import RetryScheduled, guard
from tinkex.observability.process import bus_for

if TYPE_CHECKING:
    from tinkex.observability.events import Sink

__all__ = ["with_retry", "with_retry_async"]

T = TypeVar("T")


def with_retry(
    operation: Callable[[], T], config: RetryConfig | None = None, *, events: Sink | None = None
) -> T:
    """Calls ``operation`` until it returns, and returns its value; raises its error if a retry is useless or not allowed.

    An error is retried if it is ``retryable``, or one of ``config.retryable_exceptions``, until
    ``config.progress_timeout`` seconds have passed since the first call. The wait is what the server asks for, or else
    grows from ``retry_delay_base`` to ``retry_delay_max`` seconds. Each retry is a ``RetryScheduled`` event,
    which ``events`` receives::

        answer = tinkex.with_retry(lambda: sampler.sample(prompt, 1, params).result())

    Another ``config`` retries other errors, or waits less:

    >>> replies = iter([OSError("not yet"), "done"])
    >>> def step() -> str:
    ...     if isinstance(reply := next(replies), OSError):
    ...         raise reply
    ...     return reply
    >>> with_retry(step, RetryConfig(retryable_exceptions=(OSError,), retry_delay_base=0.001))
    'done'

    The client retries its own requests already; this is for steps of your program that consist of several, or that fail after
    they were accepted.
    """
    retries = _Retries(operation, config, events)
    while True:
        try:
            return operation()
        except Exception as error:  # noqa: BLE001 - raised again, unless it is retried
            time.sleep(retries.wait_s(error))


async def with_retry_async(
    operation: Callable[[], Awaitable[T]], config: RetryConfig | None = None, *, events: Sink | None = None
) -> T:
    """As :func:`with_retry`, for an ``operation`` that returns an awaitable; ``config`` and ``events`` mean the same.

    ::

        await tinkex.with_retry_async(lambda: sampler.sample_async(prompt, 1, params))
    """
    retries = _Retries(operation, config, events)
    while True:
        try:
            return await operation()
        except Exception as error:  # noqa: BLE001 - raised again, unless it is retried
            await asyncio.sleep(retries.wait_s(error))


class _Retries:
    """The retries of one operation."""

    def __init__(self, operation: object, config: RetryConfig | None, events: Sink | None) -> None:
        self._name = getattr(operation, "__qualname__", type(operation).__name__)
        self._config = config or RetryConfig()
        self._policy = self._config.policy(watched=True)
        self._events = bus_for(events, guard)
        self._began = time.monotonic()
        self._attempt = 0

    def wait_s(self, error: Exception) -> float:
        """The wait before the next attempt; raises the error if there is none."""
        listed = isinstance(error, self._config.retryable_exceptions)
        retryable = isinstance(error, TinkexError) and error.retryable
        if not self._config.enable_retry_logic or not (listed or retryable):
            raise error
        outcome = self._config.outcome(error) or NoReply()
        elapsed_s = time.monotonic() - self._began
        step = decide(outcome, self._attempt, elapsed_s, self._policy, random.random)
        if not isinstance(step, Retry):
            raise error
        reason = f"{type(error).__name__}: {error}"
        self._events.emit(RetryScheduled(self._name, self._attempt, step.after, reason))
        self._attempt += 1
        return step.after
