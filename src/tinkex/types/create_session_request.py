"""``CreateSessionRequest``, under the path of the official SDK."""

from tinkex.types import CreateSessionRequest

__all__ = ["CreateSessionRequest"]
