"""``WeightsInfoResponse``, under the path of the official SDK."""

from tinkex.types import WeightsInfoResponse

__all__ = ["WeightsInfoResponse"]
