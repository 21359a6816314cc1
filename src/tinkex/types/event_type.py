"""``EventType``, under the path of the official SDK."""

from tinkex.types import EventType

__all__ = ["EventType"]
