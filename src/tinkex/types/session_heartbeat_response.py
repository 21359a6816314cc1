"""``SessionHeartbeatResponse``, under the path of the official SDK."""

from tinkex.types import SessionHeartbeatResponse

__all__ = ["SessionHeartbeatResponse"]
