"""``ClientConfigRequest``, under the path of the official SDK."""

from tinkex.types import ClientConfigRequest

__all__ = ["ClientConfigRequest"]
