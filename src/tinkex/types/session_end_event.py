"""``SessionEndEvent``, under the path of the official SDK."""

from tinkex.types import SessionEndEvent

__all__ = ["SessionEndEvent"]
