"""How stubborn a sampling client is."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex._transport.retry import RetryPolicy

__all__ = ["RetryConfig"]


@dataclass(frozen=True)
class RetryConfig:
    """How stubbornly a sampling client tries; the defaults suit runs that last days.

    Failures that may pass are tried again as long as some sample of this client finishes within
    ``progress_timeout`` seconds. ``max_connections`` bounds the samples under way at once; the server may
    allow fewer.
    """

    max_connections: int = 1000
    progress_timeout: float = 7200.0
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True

    def __post_init__(self) -> None:
        if self.max_connections < 1 or self.progress_timeout <= 0 or self.retry_delay_base <= 0:
            raise ValueError("max_connections, progress_timeout and retry_delay_base must be positive")
        if self.retry_delay_max < self.retry_delay_base or not 0 <= self.jitter_factor <= 1:
            raise ValueError("retry_delay_max must be at least retry_delay_base, jitter_factor within 0…1")

    def policy(self, *, watched: bool) -> RetryPolicy:
        """The policy for samples; ``watched``: give up when there has been no progress for too long."""
        return RetryPolicy(
            total_s=self.progress_timeout if watched else float("inf"),
            base_s=self.retry_delay_base,
            cap_s=self.retry_delay_max,
            jitter=self.jitter_factor,
        )
