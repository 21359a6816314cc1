"""Where official-SDK programs import ``APIFuture`` and ``AwaitableConcurrentFuture`` from."""

from tinkex.futures import APIFuture, AwaitableConcurrentFuture

__all__ = ["APIFuture", "AwaitableConcurrentFuture"]
