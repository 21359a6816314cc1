"""``CreateSessionResponse``, under the path of the official SDK."""

from tinkex.types import CreateSessionResponse

__all__ = ["CreateSessionResponse"]
