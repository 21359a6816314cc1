"""``GetInfoRequest``, under the path of the official SDK."""

from tinkex.types import GetInfoRequest

__all__ = ["GetInfoRequest"]
