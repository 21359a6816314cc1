"""``RequestErrorCategory``, under the path of the official SDK."""

from tinkex.types import RequestErrorCategory

__all__ = ["RequestErrorCategory"]
