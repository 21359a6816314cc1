"""``ListSessionsResponse``, under the path of the official SDK."""

from tinkex.types import ListSessionsResponse

__all__ = ["ListSessionsResponse"]
