"""``FutureRetrieveRequest``, under the path of the official SDK."""

from tinkex.types import FutureRetrieveRequest

__all__ = ["FutureRetrieveRequest"]
