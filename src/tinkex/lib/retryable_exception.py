"""Where official-SDK programs import ``RetryableException`` from: the result was deleted; the operation can be submitted again."""

from tinkex.errors import ResultExpiredError as RetryableException

__all__ = ["RetryableException"]
