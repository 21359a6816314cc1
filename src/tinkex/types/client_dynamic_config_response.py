"""``ClientDynamicConfigResponse``, under the path of the official SDK."""

from tinkex.types import ClientDynamicConfigResponse

__all__ = ["ClientDynamicConfigResponse"]
