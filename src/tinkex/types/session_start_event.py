"""``SessionStartEvent``, under the path of the official SDK."""

from tinkex.types import SessionStartEvent

__all__ = ["SessionStartEvent"]
