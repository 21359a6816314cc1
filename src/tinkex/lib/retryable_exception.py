"""Where official-SDK programs import ``RetryableException`` from: the result is gone, and can be had anew."""

from tinkex.errors import ResultExpiredError as RetryableException

__all__ = ["RetryableException"]
