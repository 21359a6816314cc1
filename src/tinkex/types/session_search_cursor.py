"""``SessionSearchCursor``, under the path of the official SDK."""

from tinkex.types import SessionSearchCursor

__all__ = ["SessionSearchCursor"]
