"""``FuturesRetrieveResponse``, under the path of the official SDK."""

from tinkex.types import FuturesRetrieveResponse

__all__ = ["FuturesRetrieveResponse"]
