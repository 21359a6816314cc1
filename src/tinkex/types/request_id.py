"""``RequestID``, under the path of the official SDK."""

from tinkex.types import RequestID

__all__ = ["RequestID"]
