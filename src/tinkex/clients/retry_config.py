"""How stubborn a sampling client is."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex._transport.retry import ErrorStatus, NoReply, Outcome, RetryPolicy, is_transient
from tinkex.errors import APIConnectionError, APIStatusError, ResultExpiredError

__all__ = ["RetryConfig"]


@dataclass(unsafe_hash=True)
class RetryConfig:
    """How stubbornly a sampling client tries; the defaults suit runs that last days.

    Failures that may pass are tried again as long as some sample of this client finishes within
    ``progress_timeout`` seconds. ``max_connections`` bounds the samples under way at once (None: as many as
    the server takes); the server may allow fewer. ``retryable_exceptions`` says which errors may pass,
    besides the answers 408, 409, 429 and 5xx, which always may::

        patient = tinkex.RetryConfig(retryable_exceptions=(tinkex.APIConnectionError, tinkex.RequestFailedError))
        sampler = service.create_sampling_client(base_model="toy", retry_config=patient)
    """

    max_connections: int | None = 1000
    progress_timeout: float = 7200.0
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (
        TimeoutError,
        APIConnectionError,
        ResultExpiredError,
    )

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections < 1:
            raise ValueError(
                f"max_connections must be positive, or None for no bound; got {self.max_connections}"
            )
        if self.progress_timeout <= 0 or self.retry_delay_base <= 0:
            raise ValueError("progress_timeout and retry_delay_base must be positive")
        if self.retry_delay_max < self.retry_delay_base or not 0 <= self.jitter_factor <= 1:
            raise ValueError("retry_delay_max must be at least retry_delay_base, jitter_factor within 0…1")
        kinds = self.retryable_exceptions
        if not isinstance(kinds, tuple) or not all(
            isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds
        ):
            raise TypeError(f"retryable_exceptions must be a tuple of exception classes, got {kinds!r}")

    def policy(self, *, watched: bool) -> RetryPolicy:
        """The policy for samples; ``watched``: give up when there has been no progress for too long."""
        return RetryPolicy(
            total_s=self.progress_timeout if watched else float("inf"),
            base_s=self.retry_delay_base,
            cap_s=self.retry_delay_max,
            jitter=self.jitter_factor,
        )

    def outcome(self, error: Exception) -> Outcome | None:
        """The failure as the retry policy sees it; None where another try makes no sense.

        >>> RetryConfig().outcome(ValueError("no")), RetryConfig().outcome(TimeoutError())
        (None, NoReply())
        """
        named = isinstance(error, self.retryable_exceptions)
        if not isinstance(error, APIStatusError):
            return NoReply() if named else None
        headers = error.response.headers
        if named and not is_transient(error.status_code):
            headers = {**headers, "x-should-retry": "true"}  # the caller knows better than the status
        return ErrorStatus(error.status_code, headers)
