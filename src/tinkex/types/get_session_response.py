"""``GetSessionResponse``, under the path of the official SDK."""

from tinkex.types import GetSessionResponse

__all__ = ["GetSessionResponse"]
