"""``RequestFailedResponse``, under the path of the official SDK."""

from tinkex.types import RequestFailedResponse

__all__ = ["RequestFailedResponse"]
