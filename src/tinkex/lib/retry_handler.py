"""Where official-SDK programs import ``RetryConfig`` from."""

from tinkex.clients.sampling import RetryConfig

__all__ = ["RetryConfig"]
