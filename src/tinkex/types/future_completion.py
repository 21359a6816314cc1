"""``FutureCompletion``, ``FutureFailed``, ``FutureFinished``, under the path of the official SDK."""

from tinkex.types import FutureCompletion, FutureFailed, FutureFinished

__all__ = ["FutureCompletion", "FutureFailed", "FutureFinished"]
