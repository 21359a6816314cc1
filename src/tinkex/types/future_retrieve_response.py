"""``FutureRetrieveResponse``, under the path of the official SDK."""

from tinkex.types import FutureRetrieveResponse

__all__ = ["FutureRetrieveResponse"]
