"""``SessionSearchRequest``, under the path of the official SDK."""

from tinkex.types import SessionSearchRequest

__all__ = ["SessionSearchRequest"]
