"""``FuturesRetrieveRequest``, ``SamplingSessionFuturesTarget``, under the path of the official SDK."""

from tinkex.types import FuturesRetrieveRequest, SamplingSessionFuturesTarget

__all__ = ["FuturesRetrieveRequest", "SamplingSessionFuturesTarget"]
