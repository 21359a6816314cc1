"""The retry settings of a sampling client."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex._transport.retry import ErrorStatus, NoReply, Outcome, RetryPolicy, is_transient
from tinkex.errors import APIConnectionError, APIStatusError, ResultExpiredError

__all__ = ["RetryConfig"]


@dataclass(unsafe_hash=True)
class RetryConfig:
    """How often a sampling client retries; the defaults suit runs that last days.

    Transient failures are retried as long as some sample of this client finishes within
    ``progress_timeout`` seconds. ``max_connections`` bounds the samples in flight (None: as many as
    the server accepts); the server may allow fewer. ``retryable_exceptions`` are the errors that are retried
    besides the statuses 408, 409, 429 and 5xx, which always are. ``max_retries`` bounds the attempts of each sample (None:
    the client's ``max_retries`` if that is set, else no bound). A 429 does not count: it pauses all samples of the session,
    and the same request is sent again for as long as the client makes progress. ``enable_retry_logic=False`` retries nothing
    else::

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
    max_retries: int | None = None

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections < 1:
            raise ValueError(
                f"max_connections must be positive, or None for no bound; got {self.max_connections}"
            )
        if self.progress_timeout <= 0 or self.retry_delay_base <= 0:
            raise ValueError("progress_timeout and retry_delay_base must be positive")
        if self.retry_delay_max < self.retry_delay_base or not 0 <= self.jitter_factor <= 1:
            raise ValueError("retry_delay_max must be at least retry_delay_base, jitter_factor within 0…1")
        retries = self.max_retries
        if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
            raise ValueError(f"max_retries must be an integer ≥ 0, or None for no bound; got {retries!r}")
        kinds = self.retryable_exceptions
        if not isinstance(kinds, tuple) or not all(
            isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds
        ):
            raise TypeError(f"retryable_exceptions must be a tuple of exception classes, got {kinds!r}")

    def policy(self, *, watched: bool, max_retries: int | None = None) -> RetryPolicy:
        """The policy for samples; ``watched``: give up after too long without progress.

        ``max_retries`` is the client's own bound, for a configuration without one.
        """
        return RetryPolicy(
            max_retries=max_retries if self.max_retries is None else self.max_retries,
            total_s=self.progress_timeout if watched else float("inf"),
            base_s=self.retry_delay_base,
            cap_s=self.retry_delay_max,
            jitter=self.jitter_factor,
        )

    def outcome(self, error: Exception) -> Outcome | None:
        """The failure as the retry policy sees it; None if it must not be retried.

        >>> RetryConfig().outcome(ValueError("no")), RetryConfig().outcome(TimeoutError())
        (None, NoReply())
        """
        retryable = isinstance(error, self.retryable_exceptions)
        if not isinstance(error, APIStatusError):
            return NoReply() if retryable else None
        headers = error.response.headers
        if retryable and not is_transient(error.status_code):
            headers = {**headers, "x-should-retry": "true"}  # the setting overrides the status
        return ErrorStatus(error.status_code, headers)
