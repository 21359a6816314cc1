"""``ClientConfigResponse``, under the path of the official SDK."""

from tinkex.types import ClientConfigResponse

__all__ = ["ClientConfigResponse"]
