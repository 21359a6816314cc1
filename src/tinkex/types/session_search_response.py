"""``SessionSearchResponse``, under the path of the official SDK."""

from tinkex.types import SessionSearchResponse

__all__ = ["SessionSearchResponse"]
