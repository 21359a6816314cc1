"""``SessionHeartbeatRequest``, under the path of the official SDK."""

from tinkex.types import SessionHeartbeatRequest

__all__ = ["SessionHeartbeatRequest"]
