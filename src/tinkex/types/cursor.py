"""``Cursor``, under the path of the official SDK."""

from tinkex.types import Cursor

__all__ = ["Cursor"]
